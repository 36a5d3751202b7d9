"""The tests of flags.py, data.py and tiny.py: `python -m pytest -q test_data.py`."""
import hashlib
import json
import logging
import math

import pytest
from transformers import AutoTokenizer

import data
import flags
import nano_grpo as ng
import rewards
import run
import tiny
from test_nano import EOS, TOKENIZER, one_line, settings

# --- Flags -------------------------------------------------------------------------------------------------
def refused(capsys, *argv):
    """The one line with which these flags are refused, or None."""
    return one_line(capsys, lambda: settings(*argv))

TABLE = [(modes, flag) for (_, modes), table in flags.FLAGS.items() for flag in table]
CASES = {  # a flag and the one it needs: without it, with it
    ("--guessable-filter", "--prompt"): ("--guessable-filter 8 --prompt question_only", "--prompt r1_zero"),
    ("--overlap", "--mode"): ("--overlap --mode sft", "--mode grpo"),
    ("--overlap", "--loss"): ("--overlap --loss pg", "--loss noclip"),
    ("--dynamic-sampling", "--baseline"): ("--dynamic-sampling 2 --baseline none", "--baseline loo"),
    ("--length-reward-after", "--length-reward"): ("--length-reward-after 5", "--length-reward 0.5"),
    ("--advantage-norm", "--baseline"): ("--advantage-norm std --baseline loo", "--baseline mean"),
    ("--advantage-norm", "--loss"): ("--advantage-norm mean --loss kimi", "--loss grpo_clip"),
    ("--no-std-norm", "--advantage-norm"): ("--no-std-norm --advantage-norm mean", "--advantage-norm none"),
    ("--cliprange", "--loss"): ("--cliprange 0.1 --loss cispo", "--loss gspo"),
    ("--cliprange-high", "--loss"): ("--cliprange-high 0.3 --loss noclip", "--loss cispo"),
    ("--tau", "--loss"): ("--tau 0.2", "--loss kimi"), ("--kl", "--kl-coef"): ("--kl k1", "--kl-coef 0.1"),
    ("--kl-ref-every", "--kl-coef"): ("--kl-ref-every 5 --kl-coef 0", "--kl-coef 0.1"),
    ("--loss-aggregation", "--loss"): ("--loss-aggregation token --loss kimi", "--loss pg"),
    ("--no-length-norm", "--loss-aggregation"): ("--no-length-norm --loss-aggregation token",
                                                 "--loss-aggregation constant"),
    ("--thinking-budget", "--prompt"): ("--thinking-budget 20 --prompt question_only", "--prompt r1_zero"),
    ("--wait", "--thinking-budget"): ("--wait 1", "--thinking-budget 20")}

def test_each_need_of_the_table_of_flags_has_a_case():
    needs = {(flag.name, need.split()[0].rstrip(":")) for _, flag in TABLE for need in flag.needs}
    assert needs == CASES.keys()

@pytest.mark.parametrize("name, other", CASES)
def test_a_flag_without_the_one_it_needs_is_refused_by_name_and_runs_with_it(capsys, name, other):
    argv, cure = CASES[name, other]
    line = refused(capsys, argv)
    assert f"{name} needs {other} " in line and ": " in line.split("needs")[1]
    assert refused(capsys, argv, cure) is None

@pytest.mark.parametrize("mode", ["sft", "expert_iteration"])
def test_each_flag_that_a_mode_has_no_use_for_is_refused_but_not_for_the_run_that_is_evaluated(capsys, mode):
    without = [(modes, flag) for modes, flag in TABLE if modes and mode not in modes.split("|")]
    assert len(without) > 15
    for modes, flag in without:
        value = f" {flag.kind[-1]}" if isinstance(flag.kind, list) else "" if flag.kind == "on" else " 8"
        assert f"{flag.name} needs --mode {modes.replace('|', ' or ')}: other modes do nothing with it" in (
            refused(capsys, f"--mode {mode} {flag.name}{value}"))
    for argv in ("--kl-coef 0.1", "--length-reward 1", "--cliprange 0.1 --loss grpo_clip"):
        assert refused(capsys, f"--mode eval {argv}") is None

@pytest.mark.parametrize("argv, word", [
    ("--group-size 1", "--group-size"), ("--group-size 1 --baseline none --length-reward 1", "--group-size"),
    ("--group-size 7", "--group-size"), ("--train-batch-size 96", "--train-batch-size"),
    ("--train-batch-size 512", "--train-batch-size"), ("--curriculum easy_to_hard", "--difficulty-filter"),
    ("--model a/b/c", "--model"), ("--min-tokens 97", "--min-tokens"), ("--min-tokens -1", "--min-tokens"),
    ("--temperature 0", "--temperature"), ("--lr nan", "--lr"), ("--lr abc", "--lr"), ("--keep 0", "--keep"),
    ("--tau -1 --loss kimi", "--tau"), ("--kl-coef -0.1", "--kl-coef"), ("--tis-cap 0", "--tis-cap"),
    ("--max-steps 0", "--max-steps"), ("--dynamic-sampling -1", "--dynamic-sampling"),
    ("--difficulty-filter 0", "--difficulty-filter"), ("--thinking-budget 0", "--thinking-budget"),
    ("--thinking-budget 96", "--max-tokens 96"), ("--overlong-cache 96", "--overlong-cache"),
    ("--loss dapo", "--loss"), ("--kl k4", "--kl"), ("--mode gpro", "--mode"), ("--typo 3", "--typo"),
    ("--kl-coe 0.1", "--kl-coe"), ("--resume", "--run-dir"), ("--resume --run-dir nowhere", "nowhere"),
    ("--overlap --tis-cap 2", "--tis-cap")])
def test_other_flags_that_cannot_mean_what_they_say_are_refused(capsys, argv, word):
    assert word in (refused(capsys, argv) or "nothing was refused")

@pytest.mark.parametrize("argv", [
    "--seed 0", "--min-tokens 0", "--dynamic-sampling 0", "--kl-coef 0", "--no-std-norm --baseline loo",
    "--no-std-norm --loss kimi", "--no-length-norm", "--group-size 1 --baseline none", "--wait 0",
    "--loss=gspo --cliprange=0.001", "--run-dir runs/kl", "--run-dir runs/loss --mode sft"])
def test_flags_that_mean_what_they_say_are_not_refused(capsys, argv):
    assert refused(capsys, argv) is None

@pytest.mark.parametrize("argv, want", [
    ("", ("grpo_clip", .2, .2, "std", "sequence")), ("--loss gspo", ("gspo", 3e-4, 4e-4, "std", "sequence")),
    ("--loss kimi", ("kimi", .2, .2, "none", "constant")),
    ("--no-length-norm --no-std-norm", ("grpo_clip", .2, .2, "none", "constant")),
    ("--baseline loo", ("grpo_clip", .2, .2, "none", "sequence")),
    ("--cliprange 0.1", ("grpo_clip", .1, .1, "std", "sequence")),
    ("--mode sft", ("pg", .2, .2, "std", "sequence")),
    ("--mode expert_iteration", ("pg", .2, .2, "std", "sequence")),
    ("--loss noclip --advantage-norm mean", ("noclip", .2, .2, "mean", "sequence"))])
def test_defaults_that_follow_from_the_loss_the_mode_and_the_baseline(argv, want):
    args = settings(argv)
    got = args.loss, args.cliprange, args.cliprange_high, args.advantage_norm, args.loss_aggregation
    assert got == want

def test_defaults_that_follow_from_the_hardware_the_data_and_the_prompt():
    cpu, gpu = (ng.configure({}, has_cuda) for has_cuda in (False, True))
    assert (cpu.model, cpu.dataset, cpu.max_engine_gap) == ("tiny", "arithmetic", 1e-4)
    assert (gpu.model, gpu.dataset, gpu.max_engine_gap) == ("Qwen/Qwen2.5-Math-1.5B", "math", 0.1)
    sums = ng.configure({"model": "some/model", "dataset": "sums"}, False)  # another model than tiny is large
    assert (sums.microbatch_tokens, cpu.microbatch_tokens, gpu.microbatch_tokens) == (512, 4096, None)
    assert (sums.temperature, sums.eval_temperature, cpu.eval_temperature) == (0.8, 1.0, 1.0)
    assert settings("--temperature 0.7").eval_temperature == 0.7
    for argv, want in (("--dataset sort", "sort_positions"), ("--prompt question_only", "question_only"),
                       ("--dataset sort --leaderboard", "r1_zero")):
        assert settings(argv).reward_fn == want

@pytest.mark.parametrize("present, want", [
    ("given saved leaderboard preset", 1), ("saved leaderboard preset", 2), ("leaderboard preset", 3),
    ("preset", 4), ("", 4096)])
def test_a_flag_is_as_given_or_saved_or_of_the_leaderboard_or_preset_or_derived(
        monkeypatch, tmp_path, present, want):
    key = "microbatch_tokens"
    given = {"model": "tiny"}
    if "saved" in present:
        given |= {"resume": True, "run_dir": str(tmp_path)}
        run.write_lines(tmp_path / "args.json", [{"args": {"model": "tiny", "leaderboard": True, key: 2}}])
    if "leaderboard" in present:
        given["leaderboard"] = True
        monkeypatch.setitem(flags.LEADERBOARD, key, 3)
    if "preset" in present:
        monkeypatch.setitem(flags.PRESETS["tiny"], key, 4)
    if "given" in present:
        given[key] = 1
    assert getattr(ng.configure(given, False), key) == want

def test_what_the_machine_decided_is_decided_anew_where_a_run_is_resumed(tmp_path):
    """A run of a GPU that goes on on a CPU, or on a smaller card, asks for what was typed only."""
    typed = ["--gpu-memory-utilization", "0.3"]
    args = ng.configure(ng.parse_args(typed), True)
    args.microbatch_tokens, args.gradient_checkpointing = 32768, True  # by a plan
    run.write_lines(tmp_path / "args.json", [{"args": vars(args)}])
    resume = ng.parse_args(["--resume", "--run-dir", str(tmp_path)])
    small, again = ng.configure(resume, False), ng.configure(resume, True)
    assert (small.microbatch_tokens, small.gradient_checkpointing, small.max_engine_gap) == (512, False, 1e-4)
    assert (again.microbatch_tokens, again.gradient_checkpointing, again.max_engine_gap) == (None, False, 0.1)
    assert small.gpu_memory_utilization == again.gpu_memory_utilization == 0.3
    assert small.model == again.model and small.fitted == again.fitted == args.fitted

def test_a_resumed_run_refuses_other_flags_and_its_model_is_asked_as_in_the_run(tmp_path, capsys):
    saved = vars(settings("--temperature 0.7 --max-tokens 50 --max-steps 5 --lr 1e-3 --seed 4 --kl-coef 0.2"))
    run.write_lines(tmp_path / "args.json", [{"args": saved | {"gone": 1, "run_dir": "elsewhere"}}])
    resume, model = f"--resume --run-dir {tmp_path}", f"--mode eval --model {tmp_path}/model"
    args = settings(resume, "--max-steps 9 --lr 1e-3")
    assert (args.temperature, args.max_tokens, args.max_steps, args.kl_coef) == (.7, 50, 9, .2)
    assert args.run_dir == str(tmp_path) and not hasattr(args, "gone")
    assert "--resume: lr was 0.001 in the saved run" in refused(capsys, resume, "--lr 0.2")
    (tmp_path / "model").mkdir()
    args = settings(model)
    assert (args.temperature, args.max_tokens, args.seed, args.kl_coef, args.max_steps) == (.7, 50, 4, 0, 0)
    assert settings(model, "--dataset gsm8k").temperature == 1 and settings(model, "--seed 1").seed == 1

# --- Data --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("record, want", [
    ({"question": "2+3?", "answer": "2+3=5\n#### 5"}, ("2+3?", "5", "2+3=5")),
    ({"problem": "p", "solution": "so \\boxed{a{b}}"}, ("p", "a{b}", "so \\boxed{a{b}}")),
    ({"problem": "p", "answer": "7", "level": 3}, ("p", "7", None)),
    ({"problem": "p", "solution": "s \\boxed{8}", "answer": "7"}, ("p", "7", "s \\boxed{8}")),
    ({"question": "q", "answer": 0}, ("q", "0", None)),
    ({"question": " q\r\n", "answer": "", "ground_truth": "007"}, (" q\r\n", "007", None)),
    ({"question": "q", "answer": None, "solution": "so \\boxed{ 8 }"}, ("q", "8", "so \\boxed{ 8 }")),
    ({"prompt": "x\n\nUser: a User: b\nAssistant: c\nAssistant: <think>", "ground_truth": "9",
      "response": " r\n</think>\n\n<answer> 9 </answer>"},
     ("a User: b\nAssistant: c", "9", " r\n</think> <answer> 9 </answer>")),
    ({"question": "q", "response": "r", "ground_truth": "9", "prompt": "wrong"}, ("q", "9", "r"))])
def test_records_of_known_data_sets_are_read(record, want):
    example = data.parse_record(record)
    assert (example.question, example.ground_truth, example.trace) == want

@pytest.mark.parametrize("record, words", [
    ({}, "no question or problem"), ({"question": " \n", "answer": "1"}, "no question or problem"),
    ({"question": ["q"], "answer": "1"}, "no question"), ({"question": "q", "answer": None}, "no answer"),
    ({"question": "q", "answer": math.nan}, "no answer"), ({"question": "q", "answer": []}, "no answer"),
    ({"question": "q", "answer": True}, "no answer"), ({"question": "q", "answer": "so ####"}, "no answer"),
    ({"problem": "p", "solution": "\\boxed{ }"}, "its fields: problem, solution"),
    ({"prompt": " ", "response": "2", "ground_truth": "2"}, "no question"),
    ({"question": "half an emoji \ud83d", "answer": "1"}, "surrogates")])
def test_records_without_a_question_or_an_answer_are_bad(record, words):
    with pytest.raises(ValueError, match=words):
        data.parse_record(record)

def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)

def numbered(*numbers):
    return [{"question": f"What is {n}?", "answer": str(n)} for n in numbers]

def load(dataset, eval_dataset=None, eval_size=8, mode="grpo"):
    return data.load_examples(dataset, eval_dataset, eval_size, mode)

def truths(examples):
    return [example.ground_truth for example in examples]

def write_as(path, rows):
    """Writes the rows in the form that the end of the path names; no end is a folder of save_to_disk."""
    from datasets import Dataset
    if path.suffix == ".jsonl":
        write_rows(path, rows)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows, indent=1))
    elif path.suffix == ".parquet":
        Dataset.from_list(rows).to_parquet(path)
    else:
        saved = path if not path.suffix else path.with_suffix(".saved")
        Dataset.from_list(rows).save_to_disk(saved)
        if path.suffix == ".arrow":
            next(saved.glob("*.arrow")).rename(path)
    return str(path)

@pytest.mark.parametrize("name", ["data.jsonl", "data.json", "data.parquet", "data.arrow", "folder",
                                  "d*.jsonl"])
def test_local_files_are_read_and_split_without_overlap(tmp_path, name):
    if "*" in name:  # a pattern names all its files, in order
        for start in (10, 0):
            write_as(tmp_path / f"d{start:02}.jsonl", numbered(*range(start, start + 10)))
    path = str(tmp_path / name) if "*" in name else write_as(tmp_path / name, numbered(*range(20)))
    train, held_out = load(path, None, 5)
    assert (len(train), len(held_out)) == (15, 5) and load(path, None, 5)[1] == held_out
    assert set(truths(train + held_out)) == {str(n) for n in range(20)}
    test = write_rows(tmp_path / "test.jsonl", numbered(100, 101))
    assert list(map(truths, load(path, test))) == [[str(n) for n in range(20)], ["100", "101"]]

@pytest.mark.parametrize("form", ["jsonl", "parquet", "saved"])
def test_folders_keep_their_splits_and_ask_no_hub(tmp_path, monkeypatch, form):
    import huggingface_hub
    from datasets import Dataset, DatasetDict
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda *args, **kwargs: pytest.fail("asked"))
    splits, folder = {"train": numbered(1, 2, 3), "test": numbered(4, 5)}, tmp_path / "d"
    if form == "saved":
        saved = {"train": splits["train"], "dev": splits["test"]}  # dev, val and validation are one
        DatasetDict({key: Dataset.from_list(rows) for key, rows in saved.items()}).save_to_disk(folder)
    else:
        folder.mkdir()
        for key, rows in splits.items():
            write_as(folder / f"{key}.{form}", rows)
    assert list(map(truths, load(str(folder)))) == [["1", "2", "3"], ["4", "5"]]
    other = write_rows(tmp_path / "other.jsonl", numbered(6, 7))  # of evaluation data, the test split counts
    assert list(map(truths, load(other, str(folder)))) == [["6", "7"], ["4", "5"]]

@pytest.mark.parametrize("name, want", [
    ("math", ("DigitalLearningGmbH/MATH-lighteval", None)), ("gsm8k", ("openai/gsm8k", "main")),
    ("openai/gsm8k:socratic", ("openai/gsm8k", "socratic")), ("some/data", ("some/data", None))])
def test_hub_names_carry_a_configuration(monkeypatch, name, want):
    import datasets
    import huggingface_hub
    asked = []
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda api, *ids, **kwargs: asked.append(ids))
    monkeypatch.setattr(datasets, "load_dataset", lambda *args: asked.append(args) or {"test": numbered(1)})
    assert list(data.read_examples(name, "--dataset")) == ["test"] and asked == [want[:1], want]

def test_a_hub_that_does_not_answer_is_asked_once_and_told_in_one_line(monkeypatch, caplog):
    import datasets
    import huggingface_hub

    def no_hub(*args, **kwargs):
        logging.getLogger("huggingface_hub").warning("Retrying in 1 s")
        raise OSError("no route")
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", no_hub)
    monkeypatch.setattr(huggingface_hub.HfApi, "hf_hub_download", lambda *a, **kwargs: pytest.fail("again"))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    with pytest.raises(ValueError, match=r"^--dataset no-one/nothing cannot be read \(Couldn't reach.*$"):
        data.read_examples("no-one/nothing", "--dataset")
    assert not caplog.records

def test_text_of_any_kind_and_length_is_read_as_it_stands(tmp_path):
    rows = numbered(1, 2) + [{"question": "😀\r\n\u2028é" + "x" * 100_000, "answer": "007"}]
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\r\n" for row in rows) + "\r\n"
    (tmp_path / "data.jsonl").write_bytes(b"\xef\xbb\xbf" + lines.encode())  # as Windows writes it
    for path in (str(tmp_path / "data.jsonl"), write_as(tmp_path / "data.parquet", rows)):
        examples = data.read_examples(path, "--dataset")["train"]
        assert [{"question": one.question, "answer": one.ground_truth} for one in examples] == rows

def test_bad_rows_are_dropped_and_counted(tmp_path, capsys):
    rows = [*numbered(1, 2), {"question": None, "answer": "1"}, {"question": "q", "answer": " "}, None,
            {"question": "q", "answer": {"a": 1}}, {"question": "1.50 ?", "answer": "1.50"}]
    path = write_rows(tmp_path / "data.jsonl", rows)
    examples = data.read_examples(path, "--dataset")["train"]
    assert truths(examples) == ["1", "2", "1.50"]  # a mixed column leaves text as it is
    assert capsys.readouterr().out == (f"note: --dataset {path}: 4 of 7 rows dropped: no question, or no "
                                       "answer to judge by (first: row 3 of train)\n")

def test_duplicates_are_no_leak_but_lie_on_one_side_of_a_split(tmp_path, capsys):
    rows = numbered(*range(20)) + [{"question": f"WHAT is\n {n}?", "answer": str(n)} for n in range(20)]
    path = write_rows(tmp_path / "data.jsonl", rows)
    train, held_out = load(path, None, 10)
    assert len(held_out) == 10 and len(train) < 30 and not set(truths(train)) & set(truths(held_out))
    assert f"{30 - len(train)} of 30 rows left out: their question is held out" in capsys.readouterr().out
    assert len(load(path, write_rows(tmp_path / "test.jsonl", numbered(100)))[0]) == 40

@pytest.mark.parametrize("shared", [0, 2, 3])
def test_the_own_test_split_may_share_one_question_in_a_hundred(tmp_path, capsys, shared):
    write_rows(tmp_path / "train.jsonl", numbered(*range(200)))
    write_rows(tmp_path / "test.jsonl", numbered(*range(200 - shared, 300)))
    if shared == 3:
        with pytest.raises(ValueError, match="has 3 questions of the evaluation data"):
            load(str(tmp_path))
    else:
        assert list(map(len, load(str(tmp_path)))) == [200 - shared, 100 + shared]
        assert (f"{shared} of 200 rows left out" in capsys.readouterr().out) == (shared > 0)

def test_data_with_a_test_split_alone_is_split_and_an_evaluation_takes_all(tmp_path):
    write_rows(tmp_path / "test.jsonl", numbered(*range(10)))
    assert list(map(len, load(str(tmp_path), None, 4))) == [6, 4]
    assert list(map(len, load(str(tmp_path), None, 4, "eval"))) == [0, 10]

@pytest.mark.parametrize("rows, words", [
    ([], "data.jsonl: it has no rows"), (numbered(1), "too few rows"), (numbered(1) * 9, "too few rows"),
    ([{"answer": "1"}], r"row 1 of train has no question or problem \(its fields: answer\)"),
    ([{"question": "q", "answer": None}, {"question": "q"}], "row 1 of train has no answer, ground_t")])
def test_data_files_without_rows_question_or_answer_are_refused(tmp_path, rows, words):
    with pytest.raises(ValueError, match=words):
        load(write_rows(tmp_path / "data.jsonl", rows))

def test_unreadable_and_leaking_data_are_refused(tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"question": "q", \n not json')
    (tmp_path / "bad.parquet").write_text("not parquet")
    train = write_rows(tmp_path / "train.jsonl", numbered(1, 2, 3))
    test = write_rows(tmp_path / "test.jsonl", [{"question": "  what IS\n \uff13?", "answer": "3"}])
    big = write_rows(tmp_path / "big.jsonl", numbered(*range(12_000)))
    official = write_rows(tmp_path / "official.jsonl", numbered(*range(7_500, 12_500)))
    for arguments, words in [
            ([str(tmp_path / "bad.jsonl")], "--dataset .*bad.jsonl cannot be read"),
            ([str(tmp_path / "bad.parquet")], "bad.parquet"), (["nowhere.jsonl"], "no such file"),
            ([train, "nowhere.parquet"], "--eval-dataset nowhere.parquet"),
            ([train, test], "1 questions of the evaluation data in it.*What is 3"),
            ([big, official], "has 4500 questions.*only the official 7,500/5,000 split is clean"),
            ([train, None, 1, "sft"], "train.jsonl has rows without a solution")]:
        with pytest.raises(ValueError, match=words) as error:
            load(*arguments)
        assert "\n" not in str(error.value)
        assert ("MATH" in str(error.value)) == (arguments[0] == big)

def test_bad_data_and_reward_functions_end_the_program_in_one_line_before_a_model_is_loaded(
        tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ng, "load_model", lambda args: pytest.fail("a model was loaded"))
    for argv, word in (("--dataset nowhere.jsonl", "nowhere.jsonl"), ("--reward-fn nonesuch", "--reward-fn"),
                       ("--reward-fn no_module:f", "--reward-fn")):
        line = one_line(capsys, lambda: ng.main(ng.parse_args(argv.split())))
        assert word in line
    assert not list((tmp_path / "runs").glob("*"))  # a start that fails leaves no folder

def test_a_fingerprint_names_questions_and_truths_in_order_and_no_traces():
    examples = [ng.Example("q", "1"), ng.Example("é😀", "2")]
    text = json.dumps([["q", "1"], ["é😀", "2"]])
    want = {"questions": 2, "sha256": hashlib.sha256(text.encode()).hexdigest()[:16]}
    assert data.fingerprint(examples) == want
    assert data.fingerprint([ng.Example("q", "1", "trace", [3]), examples[1]]) == want
    others = [examples[::-1], examples[:1], [ng.Example("q", "1"), ng.Example("é😀", "3")]]
    assert len({data.fingerprint(one)["sha256"] for one in [examples, *others]}) == 4

# --- The tiny model and its tasks --------------------------------------------------------------------------
@pytest.mark.parametrize("task", tiny.TASKS)
def test_built_in_tasks_are_right_disjoint_and_learnable_from_their_traces(task):
    train, held_out = load(task, None, 8, "sft")
    assert len({example.question for example in train + held_out}) == len(train) + len(held_out) == 2401
    assert len(held_out) == 600 and (train, held_out) == load(task, None, 8, "sft")
    for example in train + held_out:
        digits = [int(digit) for digit in example.question if digit.isdigit()]
        want = str(sum(digits)) if task == "arithmetic" else " ".join(map(str, sorted(digits)))
        assert example.ground_truth == want
    reward_fn = rewards.REWARDS["sort_positions" if task == "sort" else "r1_zero"]
    for row in (ng.solution_row(example, TOKENIZER, "r1_zero", "</answer>", EOS) for example in train[:200]):
        assert set(reward_fn(row.text, row.example.ground_truth).values()) == {1}
        assert len(row.response_ids) < 96

def test_the_steps_of_a_worked_solution():
    assert tiny.worked_steps("arithmetic", list("3056")) == ("3 + 0 = 3 , 3 + 5 = 8 , 8 + 6 = 14", "14")
    assert tiny.worked_steps("sort", list("305")) == ("3 + 0 = 0 3 , 0 3 + 5 = 0 3 5", "0 3 5")
    text = tiny.solution("sort", list("305"), "untagged")
    assert text == " 3 + 0 = 0 3 , 0 3 + 5 = 0 3 5 . the answer is 0 3 5"

def test_the_pre_training_texts_begin_sound_and_end_as_the_mixture_of_styles(monkeypatch):
    monkeypatch.setattr(tiny, "TEXTS", 2000)
    pairs = tiny.pretraining_texts("sort", "{question}", TOKENIZER)
    texts = [TOKENIZER.decode(response) for _, response in pairs]
    assert all(text.count("<|endoftext|>") == 1 and text.endswith("<|endoftext|>") for text in texts)
    early, late = texts[:1000], texts[1500:]
    assert not any("hmm" in text or "check" in text for text in early)
    for word, share in (("hmm", .2), ("check", .1), ("the answer is", .2)):
        found = sum(word in text for text in late) / 500
        assert abs(found - share) < 4 * math.sqrt(share * (1 - share) / 500)

def test_tiny_tokenizer_reads_the_prompt_in_few_tokens_and_survives_saving(tmp_path):
    text = ng.prompt_template("r1_zero").replace("{question}", "What is 1 + 2 + 3 + 4 ?")
    ids = TOKENIZER.encode(text)
    assert TOKENIZER.decode(ids) == text and len(ids) - len(TOKENIZER.encode("What is 1 + 2 + 3 + 4 ?")) < 20
    TOKENIZER.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    odd = "a\n<answer> 12+7 </answer> <|endoftext|> é\\frac{1}{2}"
    assert loaded.encode(text) == ids and loaded.encode(odd) == TOKENIZER.encode(odd)
    assert loaded.decode(TOKENIZER.encode(odd)) == odd and len(loaded) == len(TOKENIZER)
    assert loaded.eos_token_id == loaded.pad_token_id == EOS

def test_a_cache_that_cannot_be_written_to_is_told_with_the_variable_that_moves_it(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    for cache in (tmp_path / "file", tmp_path / "file" / "deeper"):
        monkeypatch.setenv("NANO_GRPO_CACHE", str(cache))
        with pytest.raises(OSError, match=f"^--model tiny cannot be kept in {cache} .*set NANO_GRPO_CACHE"):
            tiny.warm_start("arithmetic", "{question}")

def test_a_warm_start_is_made_once_and_anew_for_another_task_or_template(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("NANO_GRPO_CACHE", str(tmp_path))
    monkeypatch.setattr(tiny, "TEXTS", 32)
    first, again, data_file, sort, other = (tiny.warm_start(*what) for what in (
        ("arithmetic", "{question}"), ("arithmetic", "{question}"), ("x.jsonl", "{question}"),
        ("sort", "{question}"), ("arithmetic", "{question} =")))
    assert first == again == data_file and len({first, sort, other}) == 3
    assert {path.name for path in tmp_path.iterdir()} == {first.name, sort.name, other.name}
    assert capsys.readouterr().out.count("warm start: done") == 3
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in first.iterdir()}
