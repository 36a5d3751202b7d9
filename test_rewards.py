"""The tests of the judge: `python -m pytest -q test_rewards.py`.

Tables of pairs by kind, the reward functions and their doors, hostile answers, the life of the worker, and a
property: random formulas, judged as numbers say (tools/random_formulas.py).
"""
import inspect
import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import rewards
from tools import random_formulas

def table(text):
    """[(gold, answers)]: a line each, two spaces between; an indented line goes on with the one before."""
    lines = re.sub(r"\n\s+", "  ", text).strip().split("\n")
    return [(fields[0], fields[1:]) for fields in (re.split(" {2,}", line) for line in lines)]

# --- Pairs by kind: gold and answers, two spaces apart -----------------------------------------------------
SAME = table(r"""
5  \boxed{5}  \boxed 5  The final answer is: $5$.  **5**  5.0  05  x = 5  \theta=5  (5)  5\text{ cm}^2
   \\(5\\)
   5 sq. in.  5 km/h  5 students  \$5.00  {\bf 5}  \textcolor{red}{5}  a_1 = 5  **Answer:** 5  5 minutes
\text{(B)}  B  (B)  B.  \textbf{(B)}  Option B  The answer is (B).  (B) 17
\text{A,D}  D, A  \text{A and D}  (D), (A)
\frac{1}{2}  0.5  .50  1/2  \frac12  {1 \over 2}  \dfrac{1}{2}  ½  p=\frac{2}{4}
-\frac{1}{2}  \frac{-1}{2}  \frac{1}{-2}  −0.5
2\frac{1}{2}  2 1/2  2.5  \frac{5}{2}  2+\frac12
1000000  1,000,000  1{,}000{,}000  1\,000\,000  10^6  1.0\times 10^{6}  1e6  1 million
\frac{4}{33}  0.\overline{12}  0.\bar{12}  0.1\overline{21}
28\%  28  28 percent  0.28  \frac{28}{100}
\$18.90  18.9  $18.90  18.90 dollars  $18.90$
45^\circ  45  45°  45 degrees  \angle A = 45^{\circ}  angle A is 45 degrees
(1,2)  \left( 1, 2 \right)  (x,y) = (1,2)  \langle 1,2\rangle  x=1, y=2  1, 2
1,2,3  3, 2, 1  1, 2, and 3  \{1,2,3\}  x=1 or x=2 or x=3  x \in \{3,1,2\}
3 \pm 2\sqrt{2}  3-2\sqrt2, 3+2\sqrt2  x = 3 \pm 2\sqrt{2}
[2,5)  2 \le x < 5  x\in[2,5)  5 > x >= 2  {[2,5)}  $[2,5)$
(-\infty,2)\cup(2,\infty)  x \ne 2  (2,+\infty) \cup (-\infty,2)  x<2 or x>2  (-inf,2) U (2,inf)
   {(-\infty,2) \cup (2,\infty)}
\begin{pmatrix} 1/2 \\ -3 \end{pmatrix}  \begin{bmatrix} 0.5 \\[2mm] -3 \\ \end{bmatrix}
4x-5y=-50  y=\frac{4}{5}x+10  5y - 4x = 50
2\sqrt{3}  \sqrt{12}  2*sqrt(3)  \frac{6}{\sqrt3}  2\cdot 3^{1/2}  2\sqrt{3} units  2\sqrt3 \approx 3.46
\frac{3}{4}\pi  3\pi/4  0.75π  \frac{3\pi}{4}\text{ inches}  135^\circ
3+4i  4i + 3  z=3+4i
(x+1)(x+2)  (2+x)(1+x)  x^2+3x+2
\sin^2 x  (\sin x)^2  sin^2(x)  1-\cos^2 x
\text{June 20}  june 20  \text{June }20
\text{4:30 p.m.}  4:30 PM  4:30\text{ pm}
2516_8  2516_{8}  2516  (2516)_8  2516 base 8
440\text{ cm}^2  440  440 square centimeters  440 cm²
3:1  $3 : 1$  3\text{ to }1  \frac{3}{1}
2^{2005}  2^{2005}
|7-t|  |t-7|  \sqrt{(t-7)^2}  \lvert 7-t \rvert  \sqrt{t^2-14t+49}
\sqrt[4]{w^8}  w^2  |w|^2
\ln(y^2)  2\ln|y|
\lceil \frac{m}{3} \rceil  \lfloor \frac{m+2}{3} \rfloor  -\lfloor -\frac{m}{3} \rfloor
\max(p,q)  \max(q,p)  \max\{p,q\}
\min(u,v)  \min(v,u)
\gcd(k,n)  \gcd(n,k)
-4<y<9  y>-4 \text{ and } y<9  9>y>-4  (-4,9)  y<9, y>-4
pq \ge r  r \le pq
(-\infty,\infty)  \mathbb{R}  \text{all real numbers}  x \in \mathbb{R}
\emptyset  \varnothing  \{\}  \text{empty set}
\arctan y  \tan^{-1}(y)  \arctan(y)  arctan(y)
e^{2t}  \exp(2t)  exp(2t)  (e^t)^2
8  8 euros  €8  £8  8 apples  8=y  8 o'clock
640  640 g  640 s  640 grams  \$640  640.
7\text{ million}  7000000  7,000,000
\frac{5}{8}  ⅝  \frac{5}{8}}
y^5  y⁵
300000  3x10^5  3 × 10^5  3*10^5
2:7  \frac{2}{7}  2/7
(4,-7)  4, -7  x=4, y=-7  $(4,-7)$
\text{VI}  VI  \text{(VI)}
HTT  \text{HTT}
p=4, q=9  q=9, p=4
\text{yes}  Yes  YES.
30^\circ\text{C}  30  30^\circ C  30 degrees Celsius
P^{-1}AP  P^{-1} A P
""")
DIFFERENT = table(r"""
5  5 or 6  5 or 5  5; 6  \boxed{5}\boxed{6}  \boxed{5  \boxed{}  2+2=5  6=5  10/2  2+3  \sqrt{25}  x \ne 5
   5 answer here  5 million  5 squared  5\text{ is wrong}  \pm 5  [4,6]  (5,5)  ５  ٥  0x5  nan  50%  x=y=5
   __import__('os').getpid()  eval('5')  5 if True else 6  5 import os  \input{5}  \frac{0}{0}  4.9999999999
   5^2
   \lim_{x\to5}x  \binom{5}{1}  at least 5  answer  not x = 5  5 halves  5 wrong answers  5 tens  5 dozen
   5 dozens  5 lakhs  5 crores  5 quarters of them  5 pairs  5 less twos  5 blorps  5 hundred  5 fourths
   5 scores
12  1_2  1 2  12x  1,2  twelve dozen  4 threes
52_8  528  52_9  42
1  100  0.01  \frac{7}{7}  e^0
\frac{5}{6}  \frac12+\frac13  0.83  \frac{5}{3}\cdot\frac12  0.8333333333
\frac{22}{3}  4 10/3  4\frac{10}{3}
x+1  ((((((((((((x))))))))))))+1  x+1)  {x+1
\frac{1}{2004!}  \frac{1}{2006!}  0
2^{2005}  2^{2005}+1  2^{2006}
\pi  3.14159265358979  \frac{22}{7}  180
(1,2)  (2,1)  [1,2]  \{1,2\}  12  (1,2,3)  x=2, y=1  2, 1
[1,2)  1 < x < 2  [1,2]
1,2,3  1,2  1,2,2  123  1,2,3,4
1 \pm \sqrt{19}  1+\sqrt{19}
x=5  y=5  2x=10  -5
x+a  x+m  x-a  xa
3R^2  3r^2  3
\cos 13^\circ  \cos 13  \sin 13^\circ
C  not C  A or C  A, B, C  (C)(D)  D  (C) is wrong  C+1
\text{even}  odd  even or odd  not even  neve
12 \text{ yards}  12 feet  21 yards
5\text{ men}  5 women
2x+5  (x+2)+(x+3)
|x|  x  -x  \sqrt{x}^2
\text{4:30 p.m.}  4:30 a.m.  4:03 p.m.
1000  10,00  1, 000, 000
\begin{pmatrix} 1 \\ 2 \end{pmatrix}  \begin{pmatrix} 2 \\ 1 \end{pmatrix}
   \begin{pmatrix} 1 & 2 \end{pmatrix}  12
|7-t|  7-t  t-7  |t+7|  7-|t|  |t|-7
\sqrt{u^2v}  u\sqrt{v}  |uv|
|p||q|  pq  -pq  |p|q
\arcsin(\sin t)  t  \pi-t
\sqrt{y}\sqrt{z}  \sqrt{yz}
\ln|x|  \ln x
\sqrt{(x-2)(y-2)}  \sqrt{x-2}\sqrt{y-2}
|x-15|+|x+15|  30
\lfloor \frac{n}{4} \rfloor  \lfloor \frac{n}{5} \rfloor  \frac{n}{4}  \lceil \frac{n}{4} \rceil
   \lfloor \frac{n-1}{4} \rfloor  0  \lfloor \frac{n}{4}+\frac12 \rfloor
k-\lfloor \frac{k}{60} \rfloor  k
\gcd(m,n)  1  \gcd(m,n+1)  m
n \bmod 7  n  n \bmod 6  n \bmod 21
\max(p,q)  p  q  \min(p,q)  p+q
VI  IV  V  XI
\text{HTT}  THT  TTH  HT
on  no
\text{vii}  iiv  viii  vi
IX  -X  XI
7\text{ dozen}  7  7 tens
30^\circ\text{C}  30^\circ\text{F}  30^\circ F
8\text{ km}  8 miles  8 m  8 cm
\$7  7 euros  7 cents  €7
9\text{ cm}^2  9 cm  9 cm^3  9\text{ m}^2
3\text{ hours}  3 minutes  3 days
60\text{ mph}  60 km/h
p=4, q=9  9, 4  q=4, p=9  (9,4)
x<-3 \text{ or } x>5  x<-3 \text{ and } x>5  -3<x<5
\text{B or C}  B and C
-4<y<9  y>-4 \text{ or } y<9  -4<y  -4<y\le 9
P^{-1}AP  A  PAP^{-1}  AP^{-1}P
ABA^{-1}  B
f^{-1}(x)  \frac{1}{f(x)}  f(x)^{-1}
\csc x  \sin^{-1} x
\text{Tuesday}  Thursday  \text{not Tuesday}
""")

def yes(answer, gold, fast=False):
    return rewards.is_equal(answer, gold, fast)  # not fast: other work on the machine decides nothing

@pytest.mark.parametrize("gold, answers", SAME, ids=[gold for gold, _ in SAME])
def test_same(gold, answers):
    assert [answer for answer in [gold, *answers] if not yes(answer, gold)] == []

@pytest.mark.parametrize("gold, answers", DIFFERENT, ids=[gold for gold, _ in DIFFERENT])
def test_different(gold, answers):
    assert yes(gold, gold) and [answer for answer in ["", *answers] if yes(answer, gold)] == []

# --- Reward functions --------------------------------------------------------------------------------------
GOOD = " 2+3 is 5. </think> <answer> 5 </answer>"
RIGHT, WRONG, NO_FORMAT = [{"format_reward": form, "answer_reward": right, "reward": right}
                           for form, right in ((1, 1), (1, 0), (0, 0))]

def tagged(answer):
    return f" so </think> <answer> {answer} </answer>"

@pytest.mark.parametrize("want, responses", [
    (RIGHT, [GOOD, "</think> <answer> 5 </answer>", GOOD + "\n", " so </think> <answer>5</answer>",
             tagged(r"\boxed{5}"), " so </think> <answer>\n\\boxed{5}\n</answer>\n"]),
    (WRONG,
     [tagged("50"), tagged("6"), tagged(""), tagged("5 or 6"), tagged("see above"), tagged("answer here"),
             r" \boxed{5}" + tagged("see above"), tagged(r"\boxed{5} \boxed{6}"),
             tagged("__import__('os').getpid()")]),
    (NO_FORMAT, ["", "5", " hmm </think> 5", " hmm </think> <answer> 5", " <answer> 5 </answer>",
                 "\n2+3\n</think>\n<answer>\n5\n</answer>", " so </think>\n<answer> 5 </answer>",
                 " so </think><answer> 5 </answer>",  # the rule of the course is one space
                 GOOD + " and more", GOOD + " <answer> 6 </answer>", GOOD + "</answer>", "<think>" + GOOD,
                 " so <answer> 6 </answer>" + GOOD, " a </think> b" + GOOD,
                 " a </think> so <answer> 5 </answer>",
                 " a </think> <think> b </think> <answer> 5 </answer>", tagged("<answer> 5 </answer>"),
                 " a <answer> 5 </answer> </think>", " a </THINK> <ANSWER> 5 </ANSWER>",
                 GOOD + "\nUser: What is 2+2?\nAssistant: <think> ...", " <think> so" + GOOD])])
def test_r1_zero_pays_for_the_strict_format_only(want, responses):
    assert [text for text in responses if rewards.r1_zero_reward_fn(text, "5") != want] == []

def test_last_boxed_takes_the_last_balanced_box():
    boxes = {r"\boxed{1} then \boxed{\frac{1}{2}}": r"\frac{1}{2}", r"\boxed{\{1,2\}}": r"\{1,2\}",
             r"\boxed{3} \boxed{4": "3", r"\boxed{\text{a} {b}}.": r"\text{a} {b}", r"\fbox{7}": "7",
             "no box": None, r"\boxed{4": None}
    assert {text: rewards.last_boxed(text) for text in boxes} == boxes

def test_golds_may_be_numbers_or_lists():
    golds = {"number": 0.5, "list": ["7", r"\frac12"], "tuple": ("0.5",), "float32": np.float32(0.5)}
    assert all(rewards.r1_zero_reward_fn(tagged("0.5"), gold) == RIGHT for gold in golds.values())
    assert rewards.r1_zero_reward_fn(tagged("2.3"), np.float32(2.3)) == RIGHT
    assert all(rewards.r1_zero_reward_fn(tagged("0.5"), gold) == WRONG for gold in ([7, 8], "", None, []))

def test_question_only_gsm8k_and_last_number():
    assert rewards.question_only_reward_fn(r"first \boxed{4}, no: \boxed{5}", "5") == RIGHT
    assert rewards.question_only_reward_fn("5", "5") == NO_FORMAT
    assert rewards.gsm8k_reward_fn("so\n#### $1,080.00", "3 * 360\n#### 1080") == RIGHT
    assert rewards.gsm8k_reward_fn("#### 4\n#### 5 apples", "5") == RIGHT
    assert rewards.gsm8k_reward_fn("the answer is 5", "5") == NO_FORMAT
    last = rewards.REWARDS["last_number"]
    for text in ("It is 5.", "5", "2 + 3 = 5", "not 6 but **5**!", "$5$", "5.0 apples", r"\boxed{5}"):
        assert last(text, "5") == RIGHT, text
    assert last("about 1,080.50 dollars", "1080.5") == RIGHT and last("down to -3", "-3") == RIGHT
    assert [last(text, "5") for text in ("5 or 6", "15", "-5", "5.1", "")] == [WRONG] * 4 + [NO_FORMAT]

def test_countdown_pays_for_an_exact_formula_of_each_number_once():
    def reward(answer, target=24, numbers=(8, 3, 8, 3)):
        return rewards.REWARDS["countdown"](tagged(answer),
                                            json.dumps({"numbers": numbers, "target": target}))
    for answer in ("8/(3-8/3)", "8/(3-8/3) = 24", "(8 / (3 - (8/3)))"):
        assert reward(answer) == RIGHT, answer
    assert reward("(1+2)*3-4", 5, [1, 2, 3, 4]) == reward("3*2-1", 5, [1, 2, 3]) == RIGHT
    for answer in ("8*3", "8*3+8-8", "24", "8/(3-8/3) = 25", "8/(3-8/3) = 24 = 24", "88/33", "8//(3-8/3)", "",
                   "8",
                   "8**3-8*3", "8/(3-3)*8", "8/(3-8/3", "__import__('os')", "8+3+8+3", "8^3",
                   "(" * 5000 + "8",
                   "8/(3-8/3) or 24", "8-(-8)+3+3", "8 8 3 3", "8/(3-8/3)+0", "24 = 8/(3-8/3)", "8e3",
                   "٨/(3-8/3)"):
        assert reward(answer) == WRONG, answer
    assert rewards.REWARDS["countdown"]("8/(3-8/3)", '{"numbers": [8, 3, 8, 3], "target": 24}') == NO_FORMAT

def test_random_is_a_seeded_coin_and_measures_honestly():
    flips = []
    for text in (GOOD, ""):
        rewards.seed_random(1)
        scores = [rewards.random_reward_fn(text, "5") for _ in range(400)]
        assert {(one["format_reward"], one["answer_reward"]) for one in scores} == {(text != "",) * 2}
        flips.append([one["reward"] for one in scores])
    assert flips[0] == flips[1] and set(flips[0]) == {0, 1} and 150 < sum(flips[0]) < 250

# --- Sort rewards: every response of up to four digits -----------------------------------------------------
@pytest.mark.parametrize("prompt, size, tie, beat", [
    ("1 0 2", 3, 0, 0), ("3 2 4", 3, 0, 0), ("1 2 3", 3, 0, 0), ("1 2 1", 3, 4, 0), ("3 0 3", 3, 4, 0),
    ("1 0 2", 4, 73, 5), ("3 2 4", 4, 73, 5), ("1 2 3", 4, 73, 5), ("1 2 1", 4, 126, 15)])
def test_wrong_responses_that_tie_or_beat_the_right_one_under_inclusion_and_order(prompt, size, tie, beat):
    """The hole: repeated numbers and longer lists. With three different digits there is none of length 3."""
    truth = sorted(map(int, prompt.split()))
    wrong = [list(one) for one in itertools.product(range(5), repeat=size) if list(one) != truth]
    assert rewards.sort_points(truth, truth) == 5 and rewards.sort_inclusion(truth, truth) == 1
    points = [rewards.sort_points(numbers, truth) for numbers in wrong]
    assert (points.count(5), sum(one > 5 for one in points)) == (tie, beat)
    shares = [rewards.sort_inclusion(numbers, truth) for numbers in wrong]
    assert (sum(one == 1 for one in shares), sum(one > 1 for one in shares)) == (tie, beat)

@pytest.mark.parametrize("truth", ["0 1 2", "2 3 4", "1 2 3", "1 1 2", "0 3 3"])
@pytest.mark.parametrize("name", ["sort_positions", "sort_repaired"])
def test_only_the_right_numbers_earn_the_whole_reward(truth, name):
    answers = [" ".join(one) for size in range(1, 5) for one in itertools.product("01234", repeat=size)]
    earned = {answer: rewards.REWARDS[name](tagged(answer), truth)["reward"] for answer in answers}
    assert [answer for answer in answers if earned[answer] >= 1] == [truth] and min(earned.values()) >= 0
    assert getattr(rewards, name)([5, 5, 5], [1, 2, 3]) == 0  # order alone

def test_sort_rewards():
    def reward(name, numbers, form=tagged):
        return rewards.REWARDS[name](form(numbers), "1 2 3")
    third = pytest.approx(1 / 3)
    assert [reward("sort_positions", text)["reward"] for text in ("1 2 3", "1 3 2", "3 1 2")] == [1, third, 0]
    assert reward("sort_inclusion", "1 2 3 3 3") == WRONG | {"reward": pytest.approx(7 / 5)}  # the hole
    assert reward("sort_repaired", "1 2 3") == RIGHT and reward("sort_repaired", "1 2 3", str) == NO_FORMAT
    assert [reward("sort_repaired", text)["reward"] for text in ("1 3 2", "1 2", "1 2 x")] == [0.75, third, 0]

def test_shaping():
    assert rewards.kimi_length_rewards([100, 200, 300, 500], [1, 1, 0, 0]) == [0.5, 0.25, 0.0, -0.5]
    assert rewards.kimi_length_rewards([7, 7], [True, False]) == [0.0, 0.0]
    lengths = (768, 769, 896, 1024, 2000)
    assert [rewards.soft_overlong_punishment(n, 1024, 256) for n in lengths] == [0, -0.00390625, -0.5, -1, -1]
    assert rewards.language_consistency(r"so $x^2$ is \frac{1}{2} 42 here") == 1
    assert rewards.language_consistency("two words 三个字", "zh") == pytest.approx(3 / 5)
    assert rewards.language_consistency("42 $x$") == 0

# --- A user's own reward function; TRL and verl ------------------------------------------------------------
def test_reward_functions_are_loaded_from_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    for number, name in enumerate(("rf.py", "sub/rf.py", "rewards.py", "sub/deep.py")):
        (tmp_path / name).write_text(f"def f(response, ground_truth, fast=True):\n    return {number}\n")
    (tmp_path / "broken.py").write_text("def f(:\n")
    (tmp_path / "dies.py").write_text("import no_such_module_anywhere\n")
    (tmp_path / "leaves.py").write_text("raise SystemExit(3)\n")
    assert all(rewards.load_reward_fn(name) is function for name, function in rewards.REWARDS.items())
    names = {"rf:f": 0, "rf.py:f": 0, "./rf.py:f": 0, "sub/rf.py:f": 1, f"{tmp_path}/sub/deep.py:f": 3,
             "rewards.py:f": 2, "./rewards.py:f": 2}
    assert {name: rewards.load_reward_fn(name)("x", "y") for name in names} == names
    for name in ("nonsense", "rf.py:missing", "no_file.py:f", ":", "rf.py", "broken.py:f", "dies.py:f",
                 "leaves.py:f",
                 "sub/missing.py:f", "./rf.py:", ""):
        with pytest.raises(ValueError) as error:
            rewards.load_reward_fn(name)
        assert name.partition(":")[0] in str(error.value) and "\n" not in str(error.value)

def test_what_a_reward_function_returns_is_what_counts():
    assert rewards.grade_answers(["x", GOOD], ["y", "5"], lambda response, truth: 0.5) == [
        {"format_reward": 0, "answer_reward": 0, "reward": 0.5},
        {"format_reward": 1, "answer_reward": 1, "reward": 0.5}]  # accuracy stays the grader's
    own = {"reward": -2, "format_reward": True, "answer_reward": 0.25}
    assert rewards.grade_answers(["x"], ["y"], lambda response, truth: own) == [own]
    assert rewards.grade_answers(["x"], ["y"], lambda response, truth: np.float32(3))[0]["reward"] == 3
    for odd in ({"score": 1.0}, {"Reward": 1}, {}, "1.0", None, [1.0], {"reward": None}, {"reward": "a"},
                {"reward": 1, "format_reward": 1, "answer_reward": 2},
                {"reward": 1, "format_reward": 1, "answer_reward": -0.1}):
        with pytest.raises(rewards.RewardError) as error:
            rewards.grade_answers(["x"], ["y"], lambda response, truth: odd)
        assert repr(odd) in str(error.value)

def test_a_reward_function_that_raises_scores_zero_and_is_counted():
    def broken(response, ground_truth):
        return {"reward": float(response)} if response in ("nan", "-inf") else 1 / int(response)
    before = rewards.STATS["errors"]
    scores = rewards.grade_answers(["1", "0", "x", "2"], ["1"] * 4, broken)
    assert [one["reward"] for one in scores] == [1, 0, 0, 0.5] and scores[1] == NO_FORMAT
    assert rewards.STATS["errors"] == before + 2 and "ValueError" in rewards.STATS["last_error"]
    scores = rewards.grade_answers(["nan", "-inf", "1"], ["1"] * 3, broken)  # no number to learn from
    assert [one["reward"] for one in scores] == [0, 0, 1]
    assert rewards.STATS["errors"] == before + 4 and "not finite" in rewards.STATS["last_error"]
    with pytest.raises(ValueError):
        rewards.grade_answers(["1"], ["1", "2"], broken)

def test_trl_and_verl_pay_for_completions_as_those_trainers_make_them():
    box = r"\boxed{5}"
    chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": box}]
    trl, texts = rewards.trl_reward, [box, "4", chat, "<think> a" + GOOD, f"<think> 6 </think>\n{box}",
                                      "#### 5"]
    paid = [1.0, 0.0, 1.0, 1.0, 1.0, 1.0]
    assert trl(texts, ground_truth=["5"] * 6, prompts=["?"] * 6) == paid == trl(completions=texts,
                                                                                answer=["5"] * 6)
    assert trl(completions=[[chat[1]]], solution=[r"so \boxed{5}"]) == [1.0]
    assert trl([box] * 3 + [r"\boxed{None}"], ground_truth=[None, "5", "6", None]) == [None, 1.0, 0.0, None]
    golds = [["7", "5"], '["7", "5"]', np.array(["7", "5"]), np.array([7, 5]), np.array("5"), "[5]", ("5",),
             5,
             np.int64(5), np.float32(5)]
    assert trl([box] * len(golds), ground_truth=golds) == [1.0] * len(golds)
    assert trl([box, box], ground_truth=np.array(["5", "6"])) == [1.0, 0.0]
    with pytest.raises(ValueError, match="ground_truth"):
        trl([box])
    compute = rewards.compute_score
    names = "data_source solution_str ground_truth extra_info".split()
    assert list(inspect.signature(compute).parameters) == names
    assert compute("math", box, "5") == {"score": 1.0, "acc": 1.0, "format": 1.0}
    assert [compute("math", text, "5", extra_info={})["score"] for text in texts if text is not chat] == [
        1.0, 0.0, 1.0, 1.0, 1.0]
    assert all(compute("math", box, gold)["score"] == 1 for gold in golds)
    assert not (compute("math", r"\boxed{None}", None) or {"score": 0})["score"]

def test_golds_that_nobody_can_match_have_a_kind():
    for gold in ("5", "-1,234.5", r"\frac{1}{2}", "x^2+1", "(1,2)", "(B)", "A", "Alice", r"\text{Monday}",
                 "4:30 PM",
                 r"\text{June 20}", "yes", r"x \le 3", "12 cm", "1,2,3", r"\begin{pmatrix}1\\2\end{pmatrix}",
                 "HTT",
                 r"\text{no solution}", "#### 7", 5, 2.5, ["5", "6"], "Alice and Bob", r"\mathbb{R}",
                 "2516_8"):
        assert rewards.ungradable(gold) is None, gold
    prose = "The sequence converges because each term is bounded by the one before it and all are positive."
    kinds = [rewards.ungradable(gold) for gold in ("proof", "Proof.", r"\text{proof}", prose, "", "  ",
                                                   "1+" * 200 + "1")]
    assert all(isinstance(kind, str) and 0 < len(kind) < 40 and "\n" not in kind for kind in kinds), kinds

# --- Hostile answers and the life of the worker ------------------------------------------------------------
HANGS = ["99999999!", "9^{9^{9}}", "9^9^9^9", "(x+1)^{3000}", "(" * 3000 + "1" + ")" * 3000, "((9!)!)!",
         "10^{999999999}", "{" * 200 + "5", r"\frac{1}{" * 90, "x" * 10**6, r"\boxed{" * 10**5, "\ud800",
         "\x00",
         r"\sin(10^{9999})", "-" * 299, "|" * 290, r"\sqrt{" * 40 + "x" + "}" * 40, "x^" * 100 + "x",
         "1," * 140 + "1",
         r"\lfloor " * 30 + "n" + r"\rfloor " * 30, "1e999999999", r"\max(" * 9 + "x" + ",9)" * 9,
         "(x+y+z)^{999}"]

def algebra(number, fast=False):
    """True if a question that needs computer algebra, and was not asked before, is answered right."""
    return yes(rf"(x+{number})(x-{number})+y", rf"y+x^2-{number ** 2}", fast)

@pytest.mark.parametrize("hostile", HANGS, ids=range(len(HANGS)))
def test_hostile_answers_score_0_at_once(hostile):
    assert algebra(3)  # the start of the worker is not part of it
    for gold in ("7", "x+1", r"(1,\pi)", r"\text{even}", r"\lfloor \frac{n}{2} \rfloor"):
        start = time.monotonic()
        assert not yes(hostile, gold, fast=True)
        assert time.monotonic() - start < 4  # 2 s where nothing else runs
    yes("5", hostile, fast=True)
    assert time.monotonic() - start < 8 and yes("1+x+y", "x+y+1")

def test_garbage_raises_nothing():
    pieces = r"\frac { } ( ) [ ] | ^ _ , ; = < \le x 7 0 . - + \sqrt \boxed \text $ & \\ \left \right ! " + (
        r"% or \lfloor \rceil \max \sin ^{-1} \infty \cup ° e+ \begin{pmatrix} \end{pmatrix} ٥ 𝟓 ⅔ \{ \} :")
    coin, errors = random.Random(5), rewards.STATS["errors"]
    for _ in range(1500):
        answer, gold = ["".join(coin.choices(pieces.split(), k=coin.randrange(1, 9))) for _ in range(2)]
        assert yes(answer, gold, fast=True) in (True, False)
        assert isinstance(rewards.ungradable(gold), (str, type(None)))
    assert rewards.STATS["errors"] == errors, rewards.STATS["last_error"]

def test_hung_and_killed_workers_are_replaced():
    assert algebra(11)
    before, start = rewards.STATS["timeouts"], time.monotonic()
    os.kill(rewards.WORKER[0].pid, signal.SIGSTOP)
    assert not algebra(12, fast=True) and time.monotonic() - start < 2.5
    assert rewards.STATS["timeouts"] == before + 1 and algebra(13)
    os.kill(rewards.WORKER[0].pid, signal.SIGKILL)
    rewards.WORKER[0].wait()
    assert algebra(14)

def test_close_workers_leaves_no_process():
    assert algebra(15)
    pid = rewards.WORKER[0].pid
    rewards.close_workers()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    rewards.close_workers()
    assert algebra(16)

def test_worker_dies_with_its_parent():
    code = ("import rewards, os; rewards.is_equal('(x+1)(x-1)+y', 'x^2+y-1'); "
            "print(rewards.WORKER[0].pid, flush=True); os._exit(0)")
    folder = os.path.dirname(os.path.abspath(rewards.__file__))
    pid = int(subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True).stdout)
    for _ in range(100):
        try:
            with open(f"/proc/{pid}/stat") as stat:
                if stat.read().rpartition(")")[2].split()[0] == "Z":
                    return
        except FileNotFoundError:
            return
        time.sleep(0.05)
    pytest.fail("the worker outlived its parent")

def test_threads_share_the_grader():
    golds = [rf"x^2-{number ** 2}" for number in range(20, 26)] + [str(number) for number in range(200)]
    texts = [tagged(rf"(x+{number})(x-{number})") for number in range(20, 26)]
    texts += [tagged(f"x={number}.0") for number in range(200)]
    results = []

    def work():
        scores = rewards.grade_answers(texts, golds, rewards.r1_zero_reward_fn)
        results.append([one["reward"] for one in scores])
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [[1.0] * len(golds)] * 4

# --- Property: random formulas in pairs, the truth from numbers --------------------------------------------
def test_random_formulas_are_judged_as_their_values_are():
    made = random_formulas.pairs(300, 1)
    false_yes, false_no = random_formulas.misjudged(made)
    assert false_yes == [] and len(false_no) <= .02 * len([row for row in made if row[2]]), false_no
