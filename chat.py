"""Prompts that are not written in the script: a model's own chat format, and template files.

ValueError, in one line, says what cannot be used and what to do instead.
"""
from pathlib import Path
from typing import NamedTuple

class Prompt(NamedTuple):
    """What is asked, what ends the answer (None: the end token), and the reward that reads it."""
    template: str | None
    stop: str | None
    reward_fn: str | None

CURE = "take --prompt r1_zero, a file with a template, or a model that was trained to chat"

def chat_text(tokenizer, messages, generation_prompt=True):
    """Messages (dicts with role and content) in the chat format of the tokenizer. System turns that its
    template refuses (Gemma 2) or leaves out stand in front of the first user turn, as text."""
    import jinja2

    def render(turns):
        return tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=generation_prompt)
    if not tokenizer.chat_template:
        raise ValueError(f"--prompt chat: the tokenizer of this model has no chat template: {CURE}")
    system = [turn["content"].strip() for turn in messages if turn["role"] == "system"]
    try:
        text = render(messages)
        if not all(content in text for content in system):
            raise jinja2.TemplateError("the system turn is left out")
    except jinja2.TemplateError as error:
        others = [turn for turn in messages if turn["role"] != "system"]
        if not system or not others:
            raise ValueError(f"--prompt chat: the chat template of this model refuses these messages "
                             f"({str(error)[:80]}): {CURE}") from error
        first = dict(others[0], content="\n\n".join([*system, others[0]["content"]]))
        return chat_text(tokenizer, [first, *others[1:]], generation_prompt)
    return text

def chat_prompt_ids(tokenizer, example):
    """The token ids of an example's messages, or of its question as one user turn, with the generation
    prompt. A tokenizer that begins its texts with BOS gets exactly one, from the template or from here.
    [] where the template refuses the messages: some rows may have turns that it does not know."""
    messages = example.messages or [{"role": "user", "content": example.question}]
    try:
        ids = tokenizer.encode(chat_text(tokenizer, messages), add_special_tokens=False)
    except ValueError:
        return []
    bos = tokenizer.bos_token_id
    adds_bos = bos is not None and tokenizer.encode("a")[0] == bos
    return [bos, *ids] if adds_bos and ids[:1] != [bos] else ids

def end_of_turn_ids(tokenizer, eos_ids):
    """-> (ids, stop): the token ids that end an assistant turn, the template's own first, then eos_ids; and
    None, or the stop string (str) of a template whose turns do not end in one special token."""
    turns = [("user", "hello"), ("assistant", "zebra"), ("user", "tiger")]
    turns = [{"role": role, "content": content} for role, content in turns]
    text = chat_text(tokenizer, turns[:2], False).rpartition("zebra")[2].strip()
    text = text or chat_text(tokenizer, turns, False).rpartition("zebra")[2].partition("tiger")[0].strip()
    first = next(iter(tokenizer.encode(text, add_special_tokens=False)), None)
    if first in tokenizer.all_special_ids or first in tokenizer.added_tokens_decoder:
        return [first, *(token for token in eos_ids if token != first)], None
    return list(eos_ids), text.partition("\n")[0] or None

def read_prompt_file(path):
    """A file -> its template (str), in which {question} stands; other braces stay as they are. One newline at
    the end, which editors add, is taken off: a template that shall end in one has two."""
    try:
        template = Path(path).read_bytes().decode("utf-8-sig").replace("\r\n", "\n").removesuffix("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--prompt {path} cannot be read ({error}): give a text file in UTF-8") from error
    if "{question}" not in template:
        raise ValueError(f"--prompt {path}: write {{question}} where the question has to stand")
    return template

def prompt_from_file(path):
    """A file -> Prompt, with stop string and reward function of what its template asks for, if it says."""
    template = read_prompt_file(path)
    if "</answer>" in template:
        return Prompt(template, "</answer>", "r1_zero")
    return Prompt(template, None, "question_only" if "\\boxed" in template else None)
