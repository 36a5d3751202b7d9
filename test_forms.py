"""The tests of forms.py, and of the kinds of files in data.py: `python -m pytest -q test_forms.py`."""
import csv
import gzip
import io
import json

import numpy as np
import pytest

import data
import rewards
from forms import parse_record, reward_for

# --- Forms of a record -------------------------------------------------------------------------------------
def chat(*contents, roles=("user", "assistant", "user", "assistant")):
    return [{"role": role, "content": content} for role, content in zip(roles, contents)]

def with_system(*contents):
    return chat(*contents, roles=("system", "user", "assistant"))

def shares(*pairs):
    return [{"from": role, "value": content} for role, content in pairs]

TASK = '{"numbers": [44, 19, 35], "target": 98}'
LETTERS = "\nA. 3\nB. 4\nC. 5"
FORMS = {  # a record -> its question, ground truth, trace
    "DAPO-17k": ({"data_source": "math_dapo", "prompt": chat("Solve: 1 + 1"), "ability": "MATH",
                  "reward_model": {"ground_truth": "34", "style": "rule"}, "extra_info": {"index": "9a"}},
                 ("Solve: 1 + 1", "34", None)),
    "verl": ({"data_source": "openai/gsm8k", "prompt": with_system("Think.", "How many?"),
              "extra_info": {"question": "raw?", "answer": "6 * 12\n#### 72"},
              "reward_model": {"style": "rule", "ground_truth": "72"}}, ("Think.\n\nHow many?", "72", None)),
    "TRL chat": ({"prompt": with_system("Think.", "2 + 2?"), "solution": "$4$"},
                 ("Think.\n\n2 + 2?", "$4$", "$4$")),
    "TRL, solution in full": ({"prompt": chat("2 + 2?"), "solution": "We add: \\boxed{4}"},
                              ("2 + 2?", "4", "We add: \\boxed{4}")),
    "TRL prompt and completion": ({"prompt": chat("2 + 2?"), "completion": chat(
        "So <answer> 4 </answer>", roles=["assistant"])}, ("2 + 2?", "4", "So <answer> 4 </answer>")),
    "open-instruct": ({"messages": chat("1 + 4?"), "ground_truth": "5", "dataset": "gsm8k"},
                      ("1 + 4?", "5", None)),
    "open-instruct, lists": ({"messages": chat("1 + 4?"), "ground_truth": ["5"], "dataset": ["gsm8k"]},
                             ("1 + 4?", "5", None)),
    "messages that end in the answer": ({"messages": chat("1 + 4?", "It is \\boxed{5}.")},
                                        ("1 + 4?", "5", "It is \\boxed{5}.")),
    "several turns": ({"messages": chat("1 + 4?", "5", "And 2 more?", "The answer is 7.")},
                      ("1 + 4?\n\n5\n\nAnd 2 more?", "7", "The answer is 7.")),
    "ShareGPT": ({"conversations": shares(("system", "S"), ("human", "1 + 1?"), ("gpt", "#### 2"))},
                 ("S\n\n1 + 1?", "2", "#### 2")),
    "prompt and answer as text": ({"prompt": "What is 1 + 1?", "answer": "2"}, ("What is 1 + 1?", "2", None)),
    "prompt and a number": ({"prompt": "What is 1 + 1?", "answer": 2}, ("What is 1 + 1?", "2", None)),
    "SVAMP": ({"ID": "chal-1", "Body": "Each pack costs 76 dollars.", "Question": "How much for 5?",
               "Equation": "( 76.0 * 5.0 )", "Answer": 380.0, "Type": "Multiplication"},
              ("Each pack costs 76 dollars. How much for 5?", "380", None)),
    "AIME": ({"ID": "2024-I-1", "Problem": "Find x.", "Solution": "so \\boxed{204}", "Answer": 204},
             ("Find x.", "204", "so \\boxed{204}")),
    "MetaMath": ({"query": "Grace?", "response": "3 + 2 = 5\n#### 5\nThe answer is: 5",
                  "type": "GSM_Rephrased", "original_question": "other"},
                 ("Grace?", "5", "3 + 2 = 5\n#### 5\nThe answer is: 5")),
    "Countdown": ({"nums": [44, 19, 35], "target": 98},
                  ("Use each of the numbers 44, 19, 35 exactly once, with + - * / and brackets, to make 98.",
                   TASK, None)),
    "Countdown in verl": ({"prompt": chat("Make 98."), "target": 98, "nums": [44, 19, 35], "reward_model": {
        "style": "rule", "ground_truth": {"target": 98, "numbers": [44, 19, 35]}}}, ("Make 98.", TASK, None)),
    "answers in a list": ({"question": "q", "answer": ["1/2", "0.5", "1/2"]}, ("q", '["1/2", "0.5"]', None)),
    "one answer in a list": ({"question": "q", "answer": [204]}, ("q", "204", None)),
    "an answer in a dict": ({"question": "q", "answer": {"value": "Paris", "aliases": ["Paname"]}},
                            ("q", "Paris", None)),
    "SQuAD": ({"context": "It is 3.", "question": "What?", "answers": {"text": ["3"], "answer_start": [6]}},
              ("It is 3. What?", "3", None)),
    "OlympiadBench": ({"question": "q", "final_answer": ["2"], "solution": ["It has to be 2, as was shown."]},
                      ("q", "2", "It has to be 2, as was shown.")),
    "OpenMathInstruct": ({"problem": "p", "generated_solution": "by hand", "expected_answer": "7"},
                         ("p", "7", "by hand")),
    "Alpaca": ({"instruction": "Add:", "input": "1 and 2", "output": "The answer is 3."},
               ("Add: 1 and 2", "3", "The answer is 3.")),
    "Alpaca without input": ({"instruction": "Add 1 and 2.", "input": "", "output": "3"},
                             ("Add 1 and 2.", "3", "3")),
    "BIG-bench": ({"inputs": "1 + 1?", "targets": ["2"]}, ("1 + 1?", "2", None)),
    "SYNTHETIC-1": ({"prompt": "1 + 1?", "verification_info": '{"ground_truth": "2"}'},
                    ("1 + 1?", "2", None)),
    "Skywork": ({"prompt": chat("1 + 1?"), "reward_model": {"ground_truth": '["2"]'}}, ("1 + 1?", "2", None)),
    "OpenAI evals": ({"input": with_system("S", "1 + 1?"), "ideal": ["2", "two"]},
                     ("S\n\n1 + 1?", '["2", "two"]', None)),
    "all nested": ({"id": 1, "extra_info": {"question": "1 + 1?", "answer": "2"}}, ("1 + 1?", "2", None)),
    "messages as JSON": ({"messages": json.dumps(chat("1 + 1?")), "answer": "2"}, ("1 + 1?", "2", None)),
    "dicts as Python writes them": ({"prompt": str(chat("1 + 1?")), "reward_model": "{'ground_truth': '2'}"},
                                    ("1 + 1?", "2", None)),
    "parts of a turn": ({"messages": [{"role": "user", "content": [{"type": "text", "text": "1 + 1?"}]}],
                         "answer": "2"}, ("1 + 1?", "2", None)),
    "MMLU": ({"question": "2 + 2?", "choices": ["3", "4", "5"], "answer": 1},
             ("2 + 2?" + LETTERS, '["B", "4"]', None)),
    "ARC": ({"question": "2 + 2?", "choices": {"text": ["3", "4", "5"], "label": ["A", "B", "C"]},
             "answerKey": "B"}, ("2 + 2?" + LETTERS, '["B", "4"]', None)),
    "AQuA": ({"question": "2 + 2?", "options": ["A)3", "B)4", "C)5"], "correct": "B", "rationale": "we add"},
             ("2 + 2?" + LETTERS, '["B", "4"]', "we add")),
    "MedQA": ({"question": "2 + 2?", "options": {"A": "3", "B": "4", "C": "5"}, "answer": "4",
               "answer_idx": "B"}, ("2 + 2?" + LETTERS, '["B", "4"]', None)),
    "options in the question": ({"question": "2 + 2? (3, 4, 5)", "choices": ["3", "4", "5"], "answer": 1},
                                ("2 + 2? (3, 4, 5)", '["B", "4"]', None)),
    "a solution as the answer": ({"question": "q", "answer": "Jan has 3 and 5 more. The answer is 8."},
                                 ("q", "8", "Jan has 3 and 5 more. The answer is 8."))}
ROWS_OF = {  # how a file may hold a record
    "jsonl": lambda path, record: path.write_text(json.dumps(record) + "\n"),
    "parquet": lambda path, record: data_set([record]).to_parquet(path)}

def data_set(records):
    from datasets import Dataset
    return Dataset.from_list(records)

def triple(example):
    return example.question, example.ground_truth, example.trace

@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("kind", ROWS_OF)
def test_a_file_of_each_form_is_read_and_none_of_its_rows_dropped(tmp_path, capsys, name, kind):
    record, want = FORMS[name]
    path = tmp_path / f"data.{kind}"
    ROWS_OF[kind](path, record)
    splits = data.read_examples(str(path), "--dataset", rewards.ungradable)
    assert list(map(triple, splits["train"])) == [want] and capsys.readouterr().out == ""

@pytest.mark.parametrize("name", FORMS)
def test_arrays_other_capitals_and_blanks_in_names_make_no_other_form(name):
    record, want = FORMS[name]
    renamed = {field.title().replace("_", " "): value for field, value in record.items()}
    arrays = {field: np.array(value, dtype=object) if isinstance(value, list) else value
              for field, value in record.items()}
    assert triple(parse_record(renamed)) == triple(parse_record(arrays)) == want

@pytest.mark.parametrize("record, want", [
    ({"prompt": with_system("S", "q?"), "answer": "1"}, with_system("S", "q?")),
    ({"messages": with_system("S", "q?", "1")}, with_system("S", "q?")),
    ({"messages": chat("a", "b", "c", "1")}, chat("a", "b", "c")), ({"question": "q?", "answer": "1"}, None),
    ({"conversations": shares(("system", "S"), ("human", "q?"), ("gpt", "1"))}, with_system("S", "q?")),
    ({"system": "S", "conversations": shares(("user", "q?")), "answer": "1"}, with_system("S", "q?")),
    ({"system_prompt": "S", "question": "q?", "response": "1"}, with_system("S", "q?")),
    ({"problem": "q?", "messages": with_system("S", "Box: q?"), "answer": "1"}, with_system("S", "Box: q?")),
    ({"problem": "q?", "messages": chat("something else"), "answer": "1"}, None)])
def test_chat_messages_are_kept_with_their_system_turns_and_without_the_final_answer(record, want):
    example = parse_record(record)
    assert example.messages == want and example.ground_truth == "1"

@pytest.mark.parametrize("answer, want", [
    ("[1, 2]", "[1, 2]"), ("{1, 2}", "{1, 2}"), ("\\{1, 2\\}", "\\{1, 2\\}"), ("5.0", "5.0"),
    ("[0, 1)", "[0, 1)"), ("['a', 'b']", '["a", "b"]'), (5.0, "5"), (2.5, "2.5"), (np.float32(2.3), "2.3"),
    (10**30, str(10**30)), (["\\frac12", None, "é"], '["\\\\frac12", "é"]'), ("\\boxed{5}", "\\boxed{5}"),
    ("red and blue", "red and blue")])
def test_an_answer_is_taken_as_it_stands_unless_it_is_a_list_of_texts(answer, want):
    assert parse_record({"question": "q", "answer": answer}).ground_truth == want

def test_any_of_several_answers_counts_and_a_countdown_is_paid_by_its_reward():
    several = parse_record(FORMS["answers in a list"][0]).ground_truth
    grade = rewards.last_number_reward_fn
    assert [grade(said, several)["reward"] for said in ("so 1/2", "so .5", "so 2")] == [1, 1, 0]
    task = parse_record(FORMS["Countdown"][0]).ground_truth
    for expression, want in (("44 + 19 + 35", 1), ("44 + 44 + 10", 0), ("98", 0)):
        for response in (f" </think> <answer> {expression} </answer>", f"So \\boxed{{{expression} = 98}}."):
            assert rewards.countdown_reward_fn(response, task)["reward"] == want
    assert rewards.countdown_reward_fn("<answer> \\boxed{44 + 19 + 35}", task)["format_reward"] == 0
    eights = '{"numbers": [8, 3, 8, 3], "target": 24}'
    assert rewards.countdown_reward_fn("\\boxed{8 \\div (3 - 8 ÷ 3)}", eights)["reward"] == 1
    assert [reward_for(parse_record(FORMS[name][0])) for name in ("Countdown", "AIME")] == ["countdown", None]

def test_a_row_stays_if_one_of_its_answers_can_be_matched():
    prose = "It is shown above that this holds for all whole numbers."
    assert rewards.ungradable(json.dumps([prose, "5"])) is None
    assert rewards.ungradable(json.dumps([prose, "a proof"])) == "sentence"

@pytest.mark.parametrize("record, words", [
    ({"prompt": [[1]], "answer": "1"}, "no question"), ({"question": "q", "answer": []}, "no answer"),
    ({"messages": chat("a", "b")[1:], "answer": "1"}, "no question"),
    ({"messages": [{"role": "user", "content": None}], "answer": "1"}, "no question"),
    ({"messages": with_system("S"), "answer": "1"}, "no question"),
    ({"question": "q", "answer": {"a": 1}}, "no answer"), ({"nums": [1, 2], "target": "x"}, "no question"),
    ({"question": "q", "solution": "A long proof of what was\nto be shown."}, "no answer"),
    ({"question": "q", "answer": [None, " ", True]}, "no answer")])
def test_records_of_a_form_that_lack_a_question_or_an_answer_are_bad(record, words):
    with pytest.raises(ValueError, match=words):
        parse_record(record)

# --- Kinds of files ----------------------------------------------------------------------------------------
ROWS = [{"question": f"What, \"n\"\n is {n}?", "answer": f"0{n}.50"} for n in range(4)]

def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "wt", encoding="utf-8", newline="") as file:
        file.write(text)

def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)

def table(rows, delimiter):
    out = io.StringIO()
    writer = csv.DictWriter(out, list(rows[0]), delimiter=delimiter)
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()

COLUMNS = {field: [row[field] for row in ROWS] for field in ROWS[0]}
FILES = {
    "data.jsonl": lines(ROWS), "DATA.JSONL": lines(ROWS), "data.jsonl.gz": lines(ROWS),
    "data.ndjson": lines(ROWS), "data.json.gz": json.dumps(ROWS), "lines.json": lines(ROWS),
    "pretty.jsonl": "\n".join(json.dumps(row, indent=1) for row in ROWS),
    "data.csv": table(ROWS, ","), "semicolon.CSV": table(ROWS, ";"), "bom.csv": "\ufeff" + table(ROWS, ","),
    "data.tsv": table(ROWS, "\t"), "data.csv.gz": table(ROWS, ","),
    "columns.json": json.dumps(COLUMNS, indent=1), "pandas.json": json.dumps(
        {field: dict(enumerate(column)) for field, column in COLUMNS.items()}),
    "ids.json": json.dumps({f"id-{n}": row for n, row in enumerate(ROWS)}),
    "wrapped.json": json.dumps({"version": "1.0", "data": ROWS})}

@pytest.mark.parametrize("name", FILES)
def test_each_kind_of_file_is_read_with_its_text_as_it_stands(tmp_path, name):
    write(tmp_path / name, FILES[name])
    splits = data.read_examples(str(tmp_path / name), "--dataset")
    assert list(splits) == ["train"]
    assert [{"question": one.question, "answer": one.ground_truth} for one in splits["train"]] == ROWS

def test_a_json_file_of_splits_keeps_them_and_one_record_is_one_record(tmp_path):
    write(tmp_path / "splits.json", json.dumps({"train": ROWS[:3], "dev": ROWS[3:]}))
    splits = data.read_examples(str(tmp_path / "splits.json"), "--dataset")
    assert {split: len(rows) for split, rows in splits.items()} == {"train": 3, "validation": 1}
    one = {"messages": chat("1 + 1?", "The answer is 2."), "ground_truth": ["2", "two"]}
    for name in ("one.json", "one.jsonl"):
        write(tmp_path / name, json.dumps(one, indent=1))
        assert [example.question for example in data.read_examples(
            str(tmp_path / name), "--dataset")["train"]] == ["1 + 1?"]

def counts(folder):
    return {split: len(rows) for split, rows in data.read_examples(str(folder), "--dataset").items()}

def test_files_of_a_folder_may_differ_in_kind_and_columns_and_their_names_tell_the_split(tmp_path):
    chats = [{"messages": chat(f"{n}?"), "ground_truth": str(n), "level": {"of": n}} for n in range(3)]
    write(tmp_path / "train-00000-of-00002.jsonl", lines(ROWS))
    write(tmp_path / "data" / "train-00001-of-00002.csv", table([{"problem": "p", "answer": "1"}], ","))
    write(tmp_path / "gsm_test.jsonl.gz", lines(chats))
    write(tmp_path / "dev" / "algebra" / "7.json", json.dumps({"problem": "p", "solution": "\\boxed{1}"}))
    for other in (".hidden.jsonl", "dataset_info.json", "README.md", ".cache/test.jsonl"):
        write(tmp_path / other, "{}")
    assert counts(tmp_path) == {"train": 5, "test": 3, "validation": 1}
    data_set(chats).to_parquet(tmp_path / "test-2.parquet")
    assert counts(tmp_path)["test"] == 6

def test_files_whose_names_hold_a_split_inside_a_word_or_none_are_for_training(tmp_path):
    for name in ("contest.jsonl", "latest.jsonl", "devices.jsonl", "x.jsonl"):
        write(tmp_path / name, lines([{"question": name, "answer": "1"}]))
    assert counts(tmp_path) == {"train": 4}
    write(tmp_path / "test.jsonl", lines(ROWS))
    assert counts(tmp_path) == {"train": 4, "test": 4} and counts(tmp_path / "test.jsonl") == {"train": 4}

@pytest.mark.parametrize("name, words", [
    ("", "the folder holds no data file"), ("notes.txt", "its name has no known end"),
    ("none.csv", "no such file"), ("empty.csv", "it has no rows"), ("bad.jsonl.gz", "cannot be read"),
    ("cut.jsonl", "cannot be read .*line 2")])
def test_what_holds_no_data_is_refused_in_one_line(tmp_path, name, words):
    write(tmp_path / "notes.txt", "What is 1 + 1? 2")
    if name in ("empty.csv", "cut.jsonl"):
        write(tmp_path / name, "" if name == "empty.csv" else lines(ROWS[:1]) + '{"question": "q", "ans')
    if name == "bad.jsonl.gz":
        (tmp_path / name).write_text(lines(ROWS))
    with pytest.raises(ValueError, match=words) as error:
        data.read_examples(str(tmp_path / name), "--dataset")
    assert "\n" not in str(error.value) and str(tmp_path / name) in str(error.value)

def test_questions_that_repeat_are_named(tmp_path):
    write(tmp_path / "data.jsonl", lines([{"question": "What is 1 + 1?", "answer": "2"}] * 9))
    with pytest.raises(ValueError, match="1 different questions in 9 rows; 'what is 1 . 1.' stands in 9 of"):
        data.load_examples(str(tmp_path / "data.jsonl"), None, 4, "grpo")

# --- The sums ----------------------------------------------------------------------------------------------
def test_the_sums_are_all_pairs_in_a_fixed_order_and_no_sum_is_turned_around_into_the_other_split():
    train, held_out = data.load_examples("sums", None, 200, "sft", rewards.ungradable)
    assert (len(train), len(held_out)) == (700, 200)
    pairs = []
    for example in train + held_out:
        one, two = (int(word) for word in example.question.replace(".", " ").split() if word.isdigit())
        assert example.ground_truth == str(one + two) and example.trace == f"{one} + {two} = {one + two}"
        assert rewards.last_number_reward_fn(example.trace, example.ground_truth)["reward"] == 1
        pairs.append((one, two))
    assert set(pairs) == {(one, two) for one in range(1, 31) for two in range(1, 31)}
    assert not {(two, one) for one, two in pairs[700:]} & set(pairs[:700])
    assert (train, held_out) == data.load_examples("sums", None, 200, "sft")
