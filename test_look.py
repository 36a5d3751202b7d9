"""The tests of tools/look.py in a real browser: `python -m pytest -q test_look.py`.

They need Chromium (Debian: apt-get install chromium) and pip install jinja2 websocket-client; without them
the tests of the page skip. The runs are made up, but for one that the tiny model makes.
"""
import base64
import importlib.util
import json
import math
import random
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import pytest

import nano_grpo as ng
import records
from run import read_lines, write_lines
from test_nano import settings
from tools import look

LOOK = Path(look.__file__).resolve()
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
PACKAGES = {"jinja2": "jinja2", "websocket": "websocket-client"}
MISSING = [f"pip install {PACKAGES[module]}" for module in PACKAGES if not importlib.util.find_spec(module)]
MISSING += ["apt-get install chromium"] * (CHROMIUM is None)
needs_browser = pytest.mark.skipif(bool(MISSING), reason=f"no browser to try it in: {', '.join(MISSING)}")

# --- A browser ---------------------------------------------------------------------------------------------
class Browser:
    """Headless Chromium, spoken to by its DevTools protocol."""
    def __init__(self, profile):
        import websocket
        command = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
                   "--no-first-run", "--remote-debugging-port=0", "--remote-allow-origins=*",
                   f"--user-data-dir={profile}"]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        told = profile / "DevToolsActivePort"  # a port, and a path, once it listens
        while not (told.exists() and "\n" in told.read_text()):
            assert self.process.poll() is None, f"{CHROMIUM} ended at once"
            time.sleep(0.05)
        port = told.read_text().split("\n")[0]
        request = urllib.request.Request(f"http://127.0.0.1:{port}/json/new?about:blank", method="PUT")
        target = json.load(urllib.request.urlopen(request))
        self.socket = websocket.create_connection(target["webSocketDebuggerUrl"], timeout=60, max_size=None)
        self.number, self.complaints = 0, []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method, **params):
        """-> the result of one command; what the console says meanwhile is kept in complaints."""
        self.number += 1
        self.socket.send(json.dumps({"id": self.number, "method": method, "params": params}))
        while True:
            message = json.loads(self.socket.recv())
            kind, told = message.get("method"), message.get("params", {})
            if kind in ("Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled",
                        "Page.javascriptDialogOpening"):
                self.complaints.append(json.dumps(told))
            url = told["request"]["url"] if kind == "Network.requestWillBeSent" else "data:"
            self.complaints += [] if url.startswith(("file:", "data:")) else [url]
            if message.get("id") == self.number:
                assert "error" not in message, message["error"]
                return message["result"]

    def ask(self, expression):
        """-> the value of a JavaScript expression in the page."""
        result = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def open(self, path, fragment="", width=1280, height=900, theme="light"):
        """Loads a file and waits until it is ready."""
        self.complaints.clear()
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1,
                  mobile=False)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}])
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=f"file://{Path(path).resolve()}{fragment}")
        self.ask("new Promise(done => { const look = () => document.body?.dataset.ready ? done() : "
                 "setTimeout(look, 20); look(); })")

    def click(self, selector):
        self.ask(f"document.querySelector({json.dumps(selector)}).click()")

    def press(self, key):
        for kind in ("rawKeyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key,
                      windowsVirtualKeyCode={"ArrowLeft": 37, "ArrowRight": 39, "Tab": 9}[key])

    def shown(self, selector):
        """How many elements of that kind are to be seen."""
        return self.ask(f"[...document.querySelectorAll({json.dumps(selector)})].filter(one => "
                        "one.checkVisibility()).length")

    def picture(self, path):
        Path(path).write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def close(self):
        self.socket.close()
        self.process.terminate()
        self.process.wait()

@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    one = Browser(tmp_path_factory.mktemp("profile"))
    yield one
    one.close()

# --- Runs that are made up ---------------------------------------------------------------------------------
HOSTILE = ("</script><script>document.title = 'owned'</script><img src=x onerror=alert(1)><!-- {{ 7 * 7 }} & "
           "\u2028 end")
TEMPLATE = "A conversation.\nUser: {}\nAssistant: <think>"

def answer(number, right, text=None, **more):
    """An object of evaluation.jsonl."""
    return {"prompt": TEMPLATE.format(f"What is {number} + 1 ?"), "response": text or f" {number + right}",
            "ground_truth": str(number + 1), "reward": float(right), "answer_reward": float(right),
            "format_reward": 1.0, "length": 3 + number % 5, "finish_reason": "stop",
            "log_prob": -number / 10} | more

def sampled(step, row, texts, **more):
    """An object of samples.jsonl: rows 0 to 3 are a group, one of them right."""
    right = row % 4 == 1
    return answer(100 * step + row // 4, right, "".join(texts), shaped=float(right), length=len(texts)) | {
        "step": step, "group": row // 4, "advantage": 0.75 if right else -0.25, "tokens": texts,
        "log_probs": [-math.log(2)] * (len(texts) - 1) + [0.0], "ratios": []} | more

def make_run(folder, name="one", rights=(0b001011, 0b101110), start=0, ratios=False, old=False, argv=()):
    """A finished run of 6 steps and 6 held-out questions, numbered from start; bit i of rights: was the i-th
    right at step 0, and at step 6? old: of a program that kept neither the first answers nor tokens."""
    run_dir = folder / name
    run_dir.mkdir()
    first, last = ([answer(start + i, bits >> i & 1, HOSTILE if i == 5 else None) for i in range(6)]
                   for bits in rights)
    metrics = [{"step": 0, "eval/accuracy": rights[0].bit_count() / 6, "eval/stderr": 0.2}]
    metrics += [{"step": step, "train/reward": step / 10, "train/length": 20.0 + step, "train/truncated": 0.0,
                 "train/dead_groups": 0.25, "train/entropy": 1 / step, "train/kl": None, "train/tokens": 100,
                 "train/grad_norm": math.nan if step == 3 else 0.5, "train/engine_gap": 1e-6}
                for step in range(1, 7)]
    metrics += [{"step": 6, "eval/accuracy": rights[1].bit_count() / 6, "eval/stderr": 0.2}]
    more = {"response": f" sum is é{HOSTILE}", "ratios": [2.0, 0.5, 1.0, 1.0, 1.0] * ratios}
    samples = [{"step": 0} | row for row in first[:2]]
    samples += [sampled(step, row, [" sum", " is", " \ufffd", "\ufffd", HOSTILE], **more)
                for step in range(1, 7) for row in range(8)]
    new = {"group", "advantage", "tokens", "log_probs", "ratios", "log_prob"} if old else set()
    files = {"metrics": metrics, "samples": samples, "evaluation": last, "evaluation-first": first}
    for file, rows in list(files.items())[:3 if old else 4]:
        rows = [{key: row[key] for key in row.keys() - new} for row in rows]
        write_lines(run_dir / f"{file}.jsonl", rows)
    args = vars(settings("--max-steps", "6", "--eval-size", "6", *argv))
    write_lines(run_dir / "args.json", [{"args": args | {"model": f"m{HOSTILE}"}}])
    (run_dir / "result.json").write_text("{}")
    return run_dir

def make_page(folder, *runs, code=0):
    """Runs the tool as a user does -> the path of the page, or what it said where it fails."""
    command = [sys.executable, str(LOOK), *map(str, runs), "--output", str(folder / "look.html")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    return done.stderr if code else folder / "look.html"

@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The page of one run."""
    folder = tmp_path_factory.mktemp("one")
    return make_page(folder, make_run(folder))

@pytest.fixture(scope="module")
def page_of_two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    other = make_run(folder, "two", rights=(0, 0b000111), start=1, ratios=True, argv=["--no-length-norm"])
    return make_page(folder, make_run(folder), other)

# --- The page ----------------------------------------------------------------------------------------------
QUESTIONS = ("[...document.querySelectorAll('.answer')].filter(one => one.checkVisibility())"
             ".map(one => one.querySelector('.question').textContent)")
FIRST_TEXT = "document.querySelector('#row-list .text').textContent"

def question(number):
    return f"What is {number} + 1 ?"

def fill(browser, selector, value):
    """Types into a field, or picks of a list."""
    browser.ask(f"(one => {{ one.value = {value!r}; one.dispatchEvent(new Event('input')); "
                f"one.dispatchEvent(new Event('change')); }})(document.querySelector({selector!r}))")

@needs_browser
def test_the_page_loads_without_a_complaint_and_its_counts_are_those_of_the_logs(browser, page):
    for theme in ("light", "dark"):
        browser.open(page, theme=theme)
        assert browser.complaints == []  # no error, no dialog, and nothing asked of a network
    counts = "Object.fromEntries([...document.querySelectorAll('#filters button')].map(" \
             "one => [one.dataset.filter, +one.querySelector('span').textContent]))"
    assert browser.ask(counts) == {"all": 6, "wrong-right": 2, "right-wrong": 1, "unchanged": 3,
                                   "both-right": 2, "both-wrong": 1}
    head = browser.ask("document.querySelector('.run').innerText")
    assert "66.7 %" in head and "± 20.0 %" in head and "at step 0 it was 50.0 %" in head
    assert "GRPO" in head and "finished, at step 6 of 6" in head and "25% in the first 10 steps" in head
    assert browser.shown(".curves polyline") == 6 and browser.shown(".answer") == 6
    assert browser.ask("document.querySelector('#slider').max") == "6"

@needs_browser
def test_a_click_on_a_filter_leaves_exactly_its_answers(browser, page):
    browser.open(page)
    for name, numbers in (("wrong-right", [2, 5]), ("right-wrong", [0]), ("unchanged", [1, 3, 4]),
                          ("both-right", [1, 3]), ("both-wrong", [4]), ("all", range(6))):
        browser.click(f"[data-filter={name}]")
        assert browser.ask(QUESTIONS) == list(map(question, numbers)), name
        assert browser.shown("[aria-pressed=true]") == 1
    fill(browser, "#right", "0")
    browser.click("[data-filter=unchanged]")
    assert len(browser.ask(QUESTIONS)) == 6  # step 0 beside itself

@needs_browser
def test_answers_are_sorted_and_searched(browser, page):
    browser.open(page)
    for order, numbers in (("long", [4, 3, 2, 1, 0, 5]), ("short", [0, 5, 1, 2, 3, 4]),
                           ("unlikely", [5, 4, 3, 2, 1, 0]), ("asked", range(6))):
        fill(browser, "#order", order)
        assert browser.ask(QUESTIONS) == list(map(question, numbers)), order
    fill(browser, "#find-answer", "IS 3 +")
    assert browser.ask(QUESTIONS) == [question(3)] and browser.shown("mark") == 0

@needs_browser
def test_what_a_model_wrote_is_shown_and_does_nothing(browser, page):
    assert "<img" not in page.read_text()  # what is not data, as the model's name, is escaped
    browser.open(page)
    assert browser.ask("[...document.querySelectorAll('.answer .text')].at(-1).textContent") == HOSTILE
    browser.open(page, "#step-6-row-1")
    assert browser.ask(FIRST_TEXT) == f" sum is é{HOSTILE}"  # two tokens make one character
    fill(browser, "#find-row", "SCRIPT>")
    assert browser.shown("mark") == 48 and browser.shown(".text img, .text script") == 0
    assert browser.complaints == [] and browser.ask("document.title") == "one"

@needs_browser
@pytest.mark.parametrize("fragment, step, row, words", [
    ("#step-4-row-3", 4, "step-4-row-3", question(400)), ("#step-4-row-4", 4, "step-4-row-4", question(401)),
    ("#step-2", 2, None, question(200)), ("#step-99-row-0", 6, None, question(600))])
def test_a_link_opens_its_step_and_row(browser, page, fragment, step, row, words):
    browser.open(page, fragment)
    assert browser.ask("document.querySelector('#step-now').textContent") == f"step {step} of 6"
    assert browser.ask("document.querySelector('.chosen')?.id ?? null") == row
    assert browser.ask("document.activeElement.id || null") == row
    group = "document.querySelector('.chosen')?.closest('.group') ?? document.querySelector('.group')"
    assert browser.ask(f"({group}).querySelector('.question').textContent") == words
    assert browser.shown(".row") == 8 and browser.shown(".group") == 2 and not browser.shown(".answer")
    browser.ask("location.hash = '#step-1-row-0'")
    browser.ask("new Promise(done => setTimeout(done, 50))")
    assert browser.ask("document.querySelector('.chosen').id") == "step-1-row-0"

@needs_browser
def test_the_keyboard_moves_the_slider(browser, page):
    browser.open(page, "#step-3")
    now = "[document.querySelector('#slider').value, document.querySelector('.row').id, location.hash]"
    for key, step in (("ArrowRight", 4), ("ArrowRight", 5), ("ArrowLeft", 4)):
        browser.press(key)
        assert browser.ask(now) == [str(step), f"step-{step}-row-0", f"#step-{step}"]
    browser.ask("document.querySelector('#slider').focus()")
    browser.press("ArrowRight")  # once, not twice: the slider has the key
    assert browser.ask(now) == ["5", "step-5-row-0", "#step-5"]
    for _ in range(3):
        browser.press("ArrowRight")
    assert browser.ask(now)[0] == "6"
    browser.ask("document.querySelector('#find-row').focus()")
    browser.press("ArrowLeft")  # moves in the text
    assert browser.ask(now)[0] == "6"
    browser.ask("document.querySelector('#tab-rollouts').focus()")
    browser.press("ArrowLeft")
    assert browser.shown(".answer") == 6 and browser.shown(".row") == 0

COLOURS = "[...document.querySelectorAll('#step-5-row-1 .text span')].map(one => one.style.background)"

@needs_browser
def test_tokens_are_coloured_by_what_the_step_did_or_by_surprise(browser, page, page_of_two):
    browser.open(page, "#step-5-row-1")  # advantage 0.75, the largest; p = 1/2, and 1 at the last token
    assert browser.ask(COLOURS) == ["rgb(var(--good) / 0.37)"] * 3 + [""]
    assert browser.ask(COLOURS.replace("row-1", "row-0")) == ["rgb(var(--bad) / 0.12)"] * 3 + [""]
    assert "advantage × surprise" in browser.ask("document.querySelector('#legend').textContent")
    browser.click("[data-mode=surprise]")
    assert browser.ask(COLOURS) == ["rgb(var(--odd) / 0.13)"] * 3 + [""]  # 0.75 ln 2 / 4
    browser.open(page_of_two, "#run-2-step-5-row-1")  # ratios 2 and 1/2: up by p, as asked, and down by p / 2
    assert browser.ask(COLOURS.replace("#step", "#run-2-step")) == [
        "rgb(var(--good) / 0.75)", "rgb(var(--bad) / 0.38)", "", ""]

@needs_browser
def test_two_runs_share_axes_and_stand_side_by_side(browser, page_of_two):
    browser.open(page_of_two)
    assert browser.complaints == [] and browser.shown(".curves polyline") == 12 and browser.shown(".run") == 2
    assert browser.ask("document.querySelectorAll('.differs').length") == 1
    assert browser.ask("document.querySelector('.differs').textContent") == "loss aggregation: constant"
    browser.click("[data-filter=right-wrong]")  # the end of one beside the end of two
    assert browser.ask(QUESTIONS) == [question(5)]
    told = browser.ask("document.querySelector('#answer-count').textContent")
    assert told == "1 of 5 answers; 1 question of one side only left out"
    browser.open(page_of_two, "#run-2-step-4-row-3")
    assert browser.ask("document.querySelector('.chosen').id") == "run-2-step-4-row-3"
    assert browser.shown(".row") == 16 and browser.shown(".pair") == 2
    assert browser.ask("[...document.querySelectorAll('.pair .question')].map(one => one.textContent)") == [
        f"{name}: {question(number)}" for number in (400, 401) for name in ("one", "two")]

@needs_browser
def test_a_run_of_before_the_log_kept_tokens_opens(browser, tmp_path):
    browser.open(make_page(tmp_path, make_run(tmp_path, old=True)), "#step-2-row-3")
    assert browser.complaints == [] and browser.shown(".row") == 8 and browser.shown(".text span") == 0
    assert "has no log-probs" in browser.ask("document.querySelector('#legend').textContent")
    assert browser.ask(FIRST_TEXT) == f" sum is é{HOSTILE}"
    browser.click("#tab-answers")
    browser.click("[data-filter=both-wrong]")
    assert browser.ask(QUESTIONS) == [question(0), question(4)] and browser.shown(".side") == 2

@needs_browser
def test_a_run_that_has_just_begun_opens(browser, tmp_path):
    run_dir = make_run(tmp_path, argv=["--mode", "expert_iteration"])
    for name in ("evaluation-first.jsonl", "evaluation.jsonl", "samples.jsonl", "result.json"):
        (run_dir / name).unlink()
    write_lines(run_dir / "metrics.jsonl", [])
    browser.open(make_page(tmp_path, run_dir))
    head = browser.ask("document.querySelector('.run').innerText")
    assert browser.complaints == [] and "not evaluated yet" in head and "not finished, at step 0" in head
    browser.click("#tab-rollouts")
    assert "no rows" in browser.ask("document.querySelector('#row-count').textContent")

@needs_browser
def test_the_page_of_a_run_of_the_tiny_model_counts_what_its_logs_count(browser, tmp_path):
    argv = ("--mode grpo --max-steps 2 --rollout-batch-size 32 --eval-size 64 --sampler hf --max-tokens 48 "
            "--run-dir run --model tiny --epochs-per-rollout-batch 2").split()
    subprocess.run([sys.executable, ng.__file__, *argv], cwd=tmp_path, check=True, capture_output=True)
    first, last = (read_lines(tmp_path / "run" / f"evaluation{name}.jsonl") for name in ("-first", ""))
    won = [after["prompt"].split("User: ")[1].split("\n")[0] for before, after in zip(first, last)
           if before["answer_reward"] < after["answer_reward"]]
    browser.open(make_page(tmp_path, tmp_path / "run"))
    browser.click("[data-filter=wrong-right]")
    assert browser.complaints == [] and browser.ask(QUESTIONS) == won
    browser.open(tmp_path / "look.html", "#step-2-row-9")
    samples = [row for row in read_lines(tmp_path / "run" / "samples.jsonl") if row["step"] == 2]
    assert browser.shown(".row") == len(samples) == 32
    assert browser.ask("document.querySelector('.chosen .text').textContent") == "".join(samples[9]["tokens"])

# --- What the page is made of ------------------------------------------------------------------------------
def records_of(key, values):
    return [{"step": i, key: value} for i, value in enumerate(values)]

@pytest.mark.parametrize("lines, words", [
    (records_of("train/reward", [0.1] * 20 + [0.8] * 20 + [0.3] * 20), "step 5.: .*was 0.8 and is 0.4"),
    (records_of("eval/accuracy", [0.3, 0.9, 0.5]), "held-out accuracy fell from 90.0% to 50.0%"),
    (records_of("train/dead_groups", [0.1] * 10 + [0.8] * 10), "10% in the first 10 steps, 80% in the last"),
    (records_of("train/truncated", [0.0] * 10 + [0.2] * 10), "0% in the first 10 steps, 20% in the last"),
    (records_of("train/engine_gap", [1e-6, 6e-4]), "at most 0.0006 nats"),
    (records_of("train/bad_steps", [None, 1, 1, 1]), "3 steps were not applied"),
    (records_of("train/grader_errors", [1, 4]), "failed 4 times")])
def test_the_health_of_a_run_is_told_in_words(lines, words):
    told = look.health(lines, vars(settings()), True)
    assert any(warns and re.search(words, line) for warns, line in told), told
    calm = look.health([{"step": 1} | dict.fromkeys(lines[0].keys() - {"step"}, 0)], vars(settings()), True)
    assert not any(warns for warns, _ in calm)

@pytest.mark.parametrize("argv, line", [
    ([], "GRPO"),
    (["--no-std-norm --no-length-norm"], "GRPO but for advantage norm none, loss aggregation constant"),
    (["--kl-coef 0.04 --train-batch-size 64"], "GRPO, with kl coef 0.04, 4 optimizer steps a rollout"),
    (["--baseline loo --loss pg"], "GRPO but for baseline loo, advantage norm none, loss pg"),
    (["--mode", "sft"], "sft")])
def test_the_recipe_is_one_line(argv, line):
    assert look.recipe(vars(settings(*argv))) == line

def test_a_question_is_what_its_prompt_has_of_its_own():
    rows = [{"prompt": TEMPLATE.format(text)} for text in ("What is 1 ?", "What is 2\nthen ?", "What is 1 ?")]
    assert list(map(look.questions_of(rows).get, (row["prompt"] for row in rows))) == [
        "What is 1 ?", "What is 2\nthen ?", "What is 1 ?"]
    chat = [{"prompt": f"<|im_start|>user\nAdd {i}.<|im_end|>\n<|im_start|>assistant\n"} for i in range(2)]
    assert list(look.questions_of(chat).values()) in (["Add 0.", "Add 1."], ["Add 1.", "Add 0."])
    assert look.questions_of([{"prompt": "x"}]) == {"x": "x"} and look.questions_of([]) == {}

@needs_browser
def test_a_page_that_would_be_too_large_is_cut_and_says_so(browser, tmp_path, monkeypatch):
    rng, run_dir, path = random.Random(0), make_run(tmp_path), tmp_path / "look.html"
    texts = [[f" {rng.randrange(1000)}" for _ in range(300)] for _ in range(240)]
    write_lines(run_dir / "samples.jsonl", [sampled(1 + i // 4, i % 4, text) for i, text in enumerate(texts)])
    monkeypatch.setattr(sys, "argv", ["look.py", str(run_dir), "--output", str(path)])
    for size, notes in ((5_000_000, 0), (190_000, 1), (75_000, 2)):
        monkeypatch.setattr(look, "PAGE_SIZE", size)
        look.main()
        assert 40_000 < path.stat().st_size < size
        told = path.read_text()
        assert ("have lost their middle" in told) + ("of the steps every" in told) == notes
        browser.open(path, "#step-60-row-3")
        assert browser.complaints == [] and browser.shown(".chosen") == 1

def test_a_folder_without_a_run_and_a_missing_jinja2_are_told_in_one_line(tmp_path):
    line, = make_page(tmp_path, tmp_path, code=2).splitlines()
    assert "holds no run" in line
    blocked = ("import sys; sys.modules['jinja2'] = None; sys.argv = ['', '.']; from tools import look; "
               "look.main()")
    done = subprocess.run([sys.executable, "-c", blocked], cwd=LOOK.parents[1], capture_output=True,
                          text=True)
    line, = done.stderr.splitlines()
    assert done.returncode == 2 and "pip install jinja2" in line

# --- What the log keeps for it -----------------------------------------------------------------------------
def kept(count, size, length, text=" x"):
    """What the log keeps of so many rows of so many tokens; the first row was not trained on."""
    example, known = ng.Example("What is 1 + 2 ?", "3"), dict(reward={"reward": 1.0}, advantage=0.5)
    rows = [ng.Row(example, [7] * length, text * length, sampler_log_probs=[-0.1234567] * length,
                   ratios=[1.0004] * length, **known) for _ in range(count)]
    return records.sample_records(rows, rows[1:], size, SimpleNamespace(decode=lambda ids: text * len(ids)))

def test_a_row_keeps_its_tokens_and_has_no_advantage_if_it_was_not_trained_on():
    kept_rows = kept(4, 2, 3)
    assert [row["group"] for row in kept_rows] == [0, 0, 1, 1]
    assert [row["advantage"] for row in kept_rows] == [0.0, 0.5, 0.5, 0.5]
    for row in kept_rows:
        assert row["tokens"] == [" x"] * 3 and row["response"] == " x x x"
        assert row["log_probs"] == [-0.123] * 3 and row["ratios"] == [1.0] * 3
        assert abs(row["log_prob"] + 0.1234567) < 1e-12

def test_a_token_keeps_the_blank_that_decoders_drop_where_a_text_begins():
    def decode(ids):
        return " ".join("ab"[token] for token in ids)

    assert [records.token_text(decode, token) for token in (0, 1)] == [" a", " b"]

@pytest.mark.parametrize("count, size, length, left", [
    (128, 8, 20, 32), (32, 8, 110, 24), (32, 8, 160, 16), (32, 8, 1000, 8), (64, 64, 4000, 64),
    (2, 2, 50_000, 2), (200, 200, 10, 64)])
@pytest.mark.parametrize("text", [" x", "\U0001f600"])
def test_a_step_stays_under_its_size_whatever_the_group_and_the_length(count, size, length, left, text):
    """Whole groups go until one is left; then tokens and texts are cut, to the same lengths in all rows."""
    rows = kept(count, size, length, text)
    assert len(json.dumps(rows)) <= records.SAMPLES_SIZE
    assert len(rows) % min(size, 64) == 0 and (len(rows) == left or text != " x")
    for row in rows:
        assert row["length"] == length and 0 < len(row["tokens"]) == len(row["log_probs"])
        longest = min(length * len(text), 24 * len(row["tokens"]))
        assert len(row["response"]) == longest or length <= 1000
