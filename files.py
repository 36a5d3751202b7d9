"""Files that are whole or not there, and errors of one line."""
import contextlib
import json
import math
import os
import sys

def stop_run(message):
    """Ends the program with exit code 2 and one line that names the flag or file and the cure."""
    print(f"nano_grpo: error: {message}", file=sys.stderr)
    sys.exit(2)

@contextlib.contextmanager
def disk(path):
    """Turns a full disk or a folder without rights into one line; what was written before stays."""
    try:
        yield
    except Exception as error:  # OSError; torch.save and safetensors have their own
        stop_run(f"{path} cannot be written ({str(error).splitlines()[0][:100]}): free space or "
                 "give rights, then --resume, or take another folder; what was written before is whole")

def write_atomic(path, write):
    """write(temporary path) makes a file or a folder, which then takes the name `path`: whoever looks there
    sees the old file or the new one. A folder that stands there keeps the files that are not written anew."""
    temporary = path.with_name(f".{path.name}.unfinished")
    with disk(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            write(temporary)
            if temporary.is_dir() and path.is_dir():
                for file in temporary.iterdir():
                    os.replace(file, path / file.name)
                temporary.rmdir()
            else:
                os.replace(temporary, path)
        finally:
            if temporary.is_file():
                temporary.unlink()

def write_lines(path, records, **form):
    """A .jsonl file, one object a line; with indent=2 an ordinary .json file."""
    text = "".join(json.dumps(record, **form) + "\n" for record in records)
    write_atomic(path, lambda temporary: temporary.write_text(text))

def read_lines(path, all_numbers=False):
    """The objects of a .jsonl file; a line that a killed run left unfinished does not count. No file: [].
    all_numbers: their values have to be numbers or None, as in metrics.jsonl."""
    try:
        records = [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []
        [value + 0.0 for record in records if all_numbers for value in record.values() if value is not None]
        return sorted(records, key=lambda record: math.floor(record.get("step", 0)))  # a log's are in order
    except (ValueError, TypeError, AttributeError, OSError) as error:
        stop_run(f"{path} is damaged ({repr(error)[:80]}): mend or remove it")
