"""The forms of a record: which fields hold its question, its answer and its written solution.

FORMS is the table: another form is another row. ValueError, in one line, says what a record lacks.
"""
import ast
import functools
import json
import numbers
import re
from dataclasses import dataclass, field

import rewards

# Known from; fields of the question, of the answer, of the written solution. Of all rows, the first field
# that holds something counts. a+b: both, joined. Capitals, blanks and _ make no other name.
FORMS = [
    ("SVAMP, DROP, SQuAD", "body+question passage+question context+question", "ground_truth answer", ""),
    ("GSM8K, MATH, AIME, DeepScaleR", "question problem", "answers", "trace response solution"),
    ("verl, DAPO, TRL", "prompt", "reward_model", "completion"),
    ("open-instruct, ShareGPT, OpenAI's fine-tuning", "messages conversations conversation", "", ""),
    ("MetaMath, OpenOrca", "query", "", "response"),
    ("Alpaca, MathInstruct", "instruction+input instruction input", "target", "output"),
    ("OlympiadBench, OpenMathInstruct, Minerva", "problem_statement question_text problem_text",
     "final_answer expected_answer reference_answer correct_answer gold_answer numerical_answer",
     "generated_solution rationale explanation reasoning cot"),
    ("SYNTHETIC-1, BIG-bench", "inputs text", "verification_info gold targets answers_spans", ""),
    ("Math23K, OpenAI evals", "original_text", "ideal ans gt final", "solutions")]
OPTIONS = "choices options"  # MMLU, ARC, AQuA; the place, the label or the text of the right one:
RIGHT_OPTION = "answer answer_key answer_index answer_idx correct correct_answer label target"
INSIDE = "value text number spans aliases"  # of an answer that is a dict, beside the names of FORMS
COUNTDOWN = "Use each of the numbers {} exactly once, with + - * / and brackets, to make {}."
END_OF_THOUGHT = " </think> <answer>"  # of the R1-Zero prompt
ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant"}

@dataclass
class Example:
    """A question, its ground truth and, where the data has one, a written solution (trace). Several answers
    that count are a JSON list of texts; of a Countdown it is the JSON text that its reward reads."""
    question: str
    ground_truth: str
    trace: str | None = None
    prompt_ids: list = field(default_factory=list)
    pass_rate: float | None = None  # of the untrained policy, with --difficulty-filter
    messages: list | None = None  # chat turns (dicts with role and content), the last of them the user's

@functools.cache
def bare_name(name):
    return re.sub(r"[^a-z0-9+]", "", str(name).lower())

def by_name(record):
    """The fields of a record under their bare names; of two with the same one, the first that has a value."""
    fields = {}
    for name, value in record.items():
        if fields.get(bare_name(name)) is None:
            fields[bare_name(name)] = value
    return fields

def names(column):
    return [bare_name(name) for row in FORMS for name in row[column].split()]

QUESTIONS, ANSWERS, SOLUTIONS = map(names, (1, 2, 3))

def plain(value):
    """Arrays as lists; text that holds a dict, or a list of texts or dicts, as that: JSON or, in CSV files,
    as Python writes it."""
    value = list(value) if getattr(value, "shape", ()) != () else value
    if not isinstance(value, str) or not re.match(r"\s*[\[{]\s*['\"{]", value):
        return value
    for read in (json.loads, ast.literal_eval):  # literals only: nothing is run
        try:
            found = read(value.strip())
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
        items = found if isinstance(found, list) else [found if isinstance(found, dict) else None]
        return found if found and all(isinstance(item, (str, dict)) for item in items) else value
    return value

def text_of(value):
    """Text or a number as text, of messages the last one's; None: blank, True, NaN, or something else."""
    if turns := chat_turns(value):
        value = turns[-1]["content"]
    if isinstance(value, float) and value.is_integer():
        value = f"{value:.0f}"  # 5.0 is how a column of whole numbers with a gap is read
    is_text = isinstance(value, (str, numbers.Number)) and not isinstance(value, bool)
    text = str(value) if is_text else ""
    return text if text.strip() not in ("", "nan") else None

def chat_turns(value):
    """Messages (role and content, or ShareGPT's from and value) -> list of dicts, or None: they are none."""
    value, turns = plain(value), []
    for turn in value if isinstance(value, (list, tuple)) else [value]:
        turn = by_name(turn) if isinstance(turn, dict) else {}
        role, content = turn.get("role", turn.get("from")), turn.get("content", turn.get("value"))
        if isinstance(content, (list, tuple)):  # parts of a multimodal turn
            content = "".join(part.get("text") or "" for part in content if isinstance(part, dict))
        if not isinstance(role, str) or not isinstance(content, str):
            return None
        turns.append({"role": ROLES.get(role, role), "content": content})
    return turns or None

def golds(value):
    """The answers (list of str) in a field: of a list each, of a dict that of the first known field."""
    value = plain(value)
    if isinstance(value, dict):
        fields = by_name(value)
        if task := countdown(fields):
            return [task]
        inner = [*ANSWERS, *INSIDE.split()]
        return next((found for name in inner if (found := golds(fields.get(name)))), [])
    if isinstance(value, (list, tuple)):
        return list(dict.fromkeys(one for item in value for one in golds(item)))
    return [text_of(value)] if text_of(value) else []

def countdown(fields):
    """Numbers to make a target of -> the ground truth (JSON text) that countdown_reward_fn reads, or None."""
    given = plain(fields.get("nums", fields.get("numbers")))
    given = re.findall(r"-?\d+", given) if isinstance(given, str) else given
    try:
        target = float(fields["target"])
        target = int(target) if target.is_integer() else target
        return json.dumps({"numbers": [int(one) for one in given], "target": target})
    except (KeyError, TypeError, ValueError):
        return None

def reward_for(example):
    """The reward function (its name) that the ground truth of a form asks for, or None: any that reads it."""
    return "countdown" if example.ground_truth.startswith('{"numbers"') else None

def written_for(form, solution, answer):
    """A written solution (str), ended with its answer as the reward called `form` reads it."""
    if form == "r1_zero" and "</think>" not in solution:
        return f" {solution.strip()}{END_OF_THOUGHT} {answer} </answer>"
    if form == "question_only" and not rewards.last_boxed(solution):
        return f"{solution} \\boxed{{{answer}}}"
    if form == "gsm8k" and "####" not in solution:
        return f"{solution}\n#### {answer}"
    if form == "last_number" and not rewards.last_number_reward_fn(solution, answer)["answer_reward"]:
        return f"{solution} The answer is {answer}"
    return solution

def answer_in(solution):
    """The answer of a written solution: boxed, in tags, behind #### or "the answer is", or the whole of a few
    words. "" or None: there is none."""
    if re.search(r"\\f?box(?:ed)?\b", solution):
        return (rewards.last_boxed(solution) or "").strip()
    if "####" in solution:
        return solution.rpartition("####")[2].strip().partition("\n")[0].strip()
    said = re.findall(r"<answer>(.*?)</answer>", solution, re.DOTALL) or re.findall(
        r"(?i)\banswer is\b:?[ \t]*(.*\S)", solution)
    short = len(solution.split()) <= 5 and "\n" not in solution.strip()
    return said[-1].strip().removesuffix(".") if said else solution.strip() if short else None

def with_choices(question, fields):
    """A question with options and the place, label or text of the right one -> the question with its options,
    and the label and the text as answers; or None."""
    options = plain(next((fields[name] for name in OPTIONS.split() if fields.get(name) is not None), None))
    if isinstance(options, dict):
        inner = by_name(options)
        lists = [plain(inner.get(name)) for name in ("label", "text")]
        labels, texts = lists if all(lists) else (options, options.values())
    else:
        texts = options if isinstance(options, (list, tuple)) else []
        texts = [re.sub(r"^\s*\(?[A-J]\s*[).:]\s*", "", str(text)) for text in texts]
        labels = list("ABCDEFGHIJ"[:len(texts)])
    labels, texts = [str(label) for label in labels], [str(text).strip() for text in texts]
    for value in [fields.get(bare_name(name)) for name in RIGHT_OPTION.split()] if len(texts) > 1 else []:
        place = str(value).strip()
        index = (labels.index(place.upper()) if place.upper() in labels else texts.index(place)
                 if place in texts else int(place) if place.isdecimal() else len(texts))
        if index < len(labels) == len(texts):
            lines = [f"{label}. {text}" for label, text in zip(labels, texts)]
            listed = all(text in question for text in texts)
            return question if listed else "\n".join([question, *lines]), [labels[index], texts[index]]
    return None

def read_question(fields):
    """-> (question or None, messages or None, the final assistant turn or None). Messages beside a question
    count if they ask it."""
    question = messages = said = None
    for name in QUESTIONS:
        parts = [fields.get(part) for part in name.split("+")]
        if parts[0] is None:
            continue
        turns = None if messages else chat_turns(parts[0])
        answer = turns.pop()["content"] if turns and turns[-1]["role"] == "assistant" else None
        if turns and turns[-1]["role"] == "user" and (question or "") in turns[-1]["content"]:
            messages, said = turns, answer
            question = question or "\n\n".join(turn["content"] for turn in turns)
        elif turns is None and not question and all(text_of(part) for part in parts):
            question = " ".join(map(text_of, parts))
            asked = re.search(r"User: (.*)\nAssistant:", question, re.DOTALL) if name == "prompt" else None
            question = asked[1].strip() if asked else question
    return question, messages, said

def first(levels, wanted, read):
    """What `read` makes of the first of the wanted fields that holds something, outer levels first."""
    found = (read(level[name]) for level in levels for name in wanted if name in level)
    return next((one for one in found if one), None)

def parse_record(record):
    """A record (dict) of one of FORMS -> Example, or ValueError. The answer is a field, or stands in the
    solution (answer_in); the question is a field, the user's turns, or in the R1-Zero prompt of a trace."""
    top, inner = by_name(record), {}
    for value in map(plain, top.values()):
        inner = by_name(value) | inner if isinstance(value, dict) else inner
    question, messages, said = read_question(top)
    question = question or read_question(inner)[0]
    trace = said or first([top, inner], SOLUTIONS, lambda value: text_of(value) or "".join(golds(value)[:1]))
    task = countdown(top) or countdown(inner)
    answers = [task] if task else first([top, inner], ANSWERS, golds) or []
    if task and not question:
        numbers_and_target = json.loads(task)
        question = COUNTDOWN.format(", ".join(map(str, numbers_and_target["numbers"])),
                                    numbers_and_target["target"])
    elif question and not messages and (chosen := with_choices(question, top)):
        question, answers = chosen
    if len(answers) == 1 and ("####" in answers[0] or len(answers[0].split()) > 5 and answer_in(answers[0])):
        whole = answers[0]  # GSM8K: solution and answer in one field
        answers = [answer_in(whole)]
        trace = whole.rpartition("####")[0].strip() if "####" in whole else trace or whole
    answers = answers or [answer_in(trace or "")]
    if not question or not answers[0]:
        missing = "question or problem" if not question else "answer, ground_truth or solution with \\boxed{}"
        fields = ", ".join(map(str, record))
        raise ValueError(f"has no {missing} (its fields: {fields}): add it or drop the row")
    system = text_of(top.get("system")) or text_of(top.get("systemprompt"))
    if system and (messages or [{"role": ""}])[0]["role"] != "system":
        messages = messages or [{"role": "user", "content": question}]
        messages = [{"role": "system", "content": system}, *messages]
    answer = answers[0] if len(answers) == 1 else json.dumps(answers, ensure_ascii=False)
    f"{question}{answer}{trace}{messages}".encode()  # half an emoji is a ValueError too: no tokenizer has it
    trace = trace and re.sub(r"</think>\s*<answer>", "</think> <answer>", trace)
    return Example(question, answer, trace, messages=messages)
