"""The judge: takes the answer out of a response, decides whether it equals the ground truth, and pays.

(1) take the answer out, (2) bring LaTeX to one spelling, (3) ask algebra.py, in a process that can be killed,
(4) compare by kind; (5) reward functions, (6) the doors for TRL and verl, (7) shaping terms. A false "no"
wastes a rollout, a false "yes" is learnt: in doubt the answer is no. Model text is never run or parsed as
Python, and it is bounded in length and depth before anything reads it. Nothing here prints, exits or knows a
flag: what cannot be is raised.
"""
import contextlib
import functools
import importlib.util
import json
import os
import random
import re
import sys
import threading
import time
import unicodedata
from collections import Counter
from fractions import Fraction

# close_workers is here for those who import this module.
from algebra import (WORKER, arithmetic, close_workers, closing, fullmatch_ascii, has_letters, latex, levels,
                     number, split_top, start_worker, turned, work_left, worker_line, wrapped)

# --- Grader ------------------------------------------------------------------------------------------------
MAX_ANSWER = 300           # characters; the longest answer of the MATH dataset has under 100
MAX_DEPTH = 10             # nested brackets
MAX_ITEMS = 30             # elements of a list
WORKER_SECONDS = 1.4       # for computer algebra on one answer; is_equal(..., fast=False) gives it 10
STATS = {"graded": 0, "symbolic": 0, "timeouts": 0, "errors": 0, "last_error": ""}
RANDOM = random.Random(0)  # the coin of random_reward_fn
LOCK = threading.Lock()    # guards STATS and the coin

class RewardError(ValueError):
    """A reward function returned what cannot be trained on."""

def count_event(name, error=""):
    """Add one to STATS[name]; `error` is kept as the text of the last error."""
    with LOCK:
        STATS[name] += 1
        STATS["last_error"] = error or STATS["last_error"]

# ---------------------------------------------------------------- 1. taking the answer out
BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # an escaped brace is a set bracket, not a group
BOX = re.compile(r"\\(?:fbox|boxed)\s*(?:(\{)|([0-9A-Za-z])(?![0-9A-Za-z]))")  # "\boxed 7" is LaTeX too
LEAD = re.compile(
    r"[*#\s]*(?:(?:(?:so|thus|hence|therefore|the|our|my|final|correct)[,\s]+)*(?:answer|solution|result)"
    r"[*\s]*(?:is|=|:)+[*:\s]*|(?:the\s+)?(?:(?:measure|length|area|value|volume|probability)\s+of\s+)?"
    r"(?:the\s+)?(?:\$?\\?(?:angle|side|segment|arc)\s+)?[A-Za-z]{1,3}\$?\s+is\s+(?=[\\$\d-]))",
    re.IGNORECASE)

def group_end(text, start):
    """Index just behind the brace that closes the one at text[start], or -1."""
    depth = 0
    for mark in BRACE.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(mark[0], 0)
        if depth == 0:
            return mark.end()
    return -1

def boxes(text):
    """Contents of the outermost boxes of `text`, in order. None stands for a box left open."""
    found = []
    position = 0
    for mark in BOX.finditer(text):
        if mark.start() < position or found.count(None) > 3:  # a wall of open boxes: quadratic time
            continue
        position = group_end(text, mark.end() - 1) if mark[1] else mark.end()
        found.append(mark[2] or (text[mark.end():position - 1] if position > 0 else None))
    return found

def last_boxed(text):
    """Content (str) of the last balanced \\boxed{} in the last 20,000 characters of `text`, or None."""
    balanced = [box for box in boxes(text[-20000:]) if box is not None]
    return balanced[-1] if balanced else None

def extract_answer(text):
    """The answer (str) in `text`, or "": a box wins over words; two different boxes or an open one: ""."""
    found = boxes(text) if len(text) <= 20 * MAX_ANSWER else [None]
    if found:
        text = found[0] if found[0] is not None and len(set(found)) == 1 else ""
    lead = LEAD.match(text)
    text = text[lead.end() if lead else 0:].strip()
    return text if len(text) <= MAX_ANSWER else ""

# ---------------------------------------------------------------- 2. one spelling
# Symbols become single characters, so that all code below can walk over characters.
UNICODE = str.maketrans({
    "−": "-", "–": "-", "×": "\\times ", "·": "*", "⋅": "*", "÷": "/", "º": "°", "√": "sqrt", "\u00a0": " ",
    "\u2009": " ", "“": '"', "”": '"', "’": "'", "′": "'", "⌊": "\\lfloor ", "⌋": "\\rfloor ",
    "⌈": "\\lceil ", "⌉": "\\rceil "})
SYMBOLS = {name: group.split()[0] for group in """π pi; ∞ infty; ∪ cup; ∈ in; ± pm; ∓ mp; ° circ degree deg;
≤ le leq leqslant; ≥ ge geq geqslant; < lt; > gt; ≠ ne neq; ≈ approx; * cdot times ast; / div; ⦃ lbrace;
⦄ rbrace; ( langle; ) rangle; | vert lvert rvert mid; : colon; ' prime; \\frac dfrac tfrac cfrac; ∅ emptyset
varnothing; ∖ setminus backslash; ℝ R reals; ≡ equiv; € euro; £ pounds; \\mod bmod;
\\binom dbinom; \\overline bar dot""".split(";") for name in group.split()[1:]}
SYMBOLS.update(dict.fromkeys("left right big Big displaystyle bf rm it small large Large huge".split(), ""))
ARGUMENT = r"\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}"  # with up to two braces inside one another
FONT = re.compile(r"\\(?:text(?:bf|it|rm|normal)?|math(?:rm|bf|it|sf|bb)|boldsymbol|bold|bm|emph|[mhf]box|"
                  rf"boxed|operatorname|underline)\s*{ARGUMENT}")
WORDS = r"(?<![A-Za-z\\])({})(?![A-Za-z])"  # whole words, not commands
REWRITES = [(re.compile(pattern), new) for pattern, new in [
    (r"(?<!\\)\$", " "), (r"\\\$", "$"),                         # $5$ is 5, \$5 is money
    (r"(?<!\\)\\[()\[\]]", " "), (r"\\%|\bpercent\b", "%"), (r"\\\{", "⦃"), (r"\\\}", "⦄"),
    (r"\\(?:text)?color\s*\{[#\w]*\}", ""),
    (r"(?<=\d)\s*(?:,\s*\\!|\{,\})\s*(?=\d{3}(?!\d))", ""),      # 5,\!525 can only be a number
    (r"(?<!\\)\\(?:[,;:! ]|q?quad(?![a-z]))|~", " "),
    (r"\{([^{}]*)\\over(?![a-z])([^{}]*)\}", r"\\frac{\1}{\2}"),
    (r"(?<![A-Za-z\\])pi(?![A-Za-z])", "π"), (r"(?<![A-Za-z])inf(?:inity|ty)?(?![A-Za-z])", "∞"),
    (r"(?:the set of )?(?:all )?real numbers|all reals", "ℝ"), (r"ℝ\s*(?:except(?: for)?|-(?=\s*⦃))", "ℝ∖"),
    (r"^\s*(?:the )?empty set\s*$|⦃\s*⦄|^\s*(?:there (?:is|are) )?no solutions?[. ]*$", "∅"),
    (WORDS.format(r"(?:arc)?(?:sin|cos|tan|cot|sec|csc)|log|ln|(?:max|min|gcd|lcm)(?=\s*[({⦃])"), r"\\\1"),
    (r"(?<![A-Za-z\\])\\?sqrt\s*(\d+)", r"\\sqrt{\1}"), (r"\\exp(?=\s*[A-Za-z0-9])\s*", "e^"),
    (r"(?<=[\d}) ])deg(?:rees?)?(?![A-Za-z])|\^\s*(?:\{\s*°\s*\}|°)", "°"),
    (r"° *(?:C|Celsius)\b", " celsius"), (r"° *(?:F|Fahrenheit)\b", " fahrenheit"), (r" ?o'clock", " oclock"),
    (r"(?<=\d) *hundred\b", "*10^{2}"), (r"(?<=\d) *thousand\b", "*10^{3}"), (r"(?<=\d) *lakh\b", "*10^{5}"),
    (r"(?<=\d) *million\b", "*10^{6}"), (r"(?<=\d) *crore\b", "*10^{7}"), (r"(?<=\d) *billion\b", "*10^{9}"),
    (r"(?<=\d) *trillion\b", "*10^{12}"), (r"(?<=\d)\s*[xX]\s*(?=10\s*\^)", "*"),
    (r"\\pmod *\{?(\w+)\}?", r"(\\mod \1)"), (r"<=", "≤"), (r">=", "≥"),
    (r"(?<=[\w)}])\*\*(?=[\w({-])", "^"), (r"(?<=\d)\s+to\s+(?=\d)", ":"),
    (r"(?<=[)\]⦄])\s*[Uu]\s*(?=[(\[⦃])", "∪"),
    (r"\s*[,;]?\s*(?<![A-Za-z\\])and(?![A-Za-z])\s*", "∧"),
    (r"\s*[,;]?\s*(?<![A-Za-z\\])or(?![A-Za-z])\s*", "∨"),
    (r"(?<=\d),\s+(?=\d{3}(?!\d))", ";"),                        # "1, 234" is a list, "1,234" a number
    (r"\s+", " "), (r"(?<![A-Za-z0-9]) | (?![A-Za-z0-9])", ""),  # "1 2" stays two numbers
    (r"(\\(?:frac|binom|overline|sqrt(?:\[\d+\])?)) ?([\dA-Za-zπ])", r"\1{\2}"),
    (rf"(\\(?:frac|binom){ARGUMENT}) ?([\dA-Za-zπ])", r"\1{\3}"),
    (r"(?<=\d) (?=[A-Za-z])|(?<=[A-Za-z]) (?=\d)", ""),
    (r"\^(-?\d+|[A-Za-z])", r"^{\1}"), (r"\^\((-?[\w/]+)\)", r"^{\1}"),
    (r"_\{(\w+)\}(?![A-Za-z0-9])", r"_\1"),
    (r"\\(sin|cos|tan|cot|sec|csc)\^\{-1\}", r"\\arc\1 "),
    (r"^\((\w+)\)_", r"\1_"), (r"\(?base ?(\w+)\)?$", r"_\1"), (r"^([A-Z])\)", r"\1."), (r"\+∞", "∞")]]
SPELLED = {"sqrt": r"\sqrt{%s}", "exp": "e^{%s}", "floor": r"\lfloor %s\rfloor ", "abs": "|%s|",
           "ceil": r"\lceil %s\rceil "}  # sqrt(x), exp(x), ... as LaTeX

def strip_edges(text):
    """Take off what may stand around an answer: white space, quotes, ** **, a final stop, one { }."""
    before = None
    while text != before:
        before = text
        text = text.strip(' \t\r\n"`').lstrip("=≈")
        text = text if text.endswith("...") else text.rstrip(".,;: \\")  # "0.333..." is not 0.333
        if found := re.fullmatch(r"\*\*(.+)\*\*|'(.+)'", text, re.DOTALL):
            text = found[1] or found[2]
        if text.startswith("{") and group_end(text, 0) == len(text):
            text = text[1:-1]
    return text

def small_digits(mark):
    """Raised and lowered characters and fractions of Unicode as LaTeX: x⁻² is x^{-2}, ¾ is \\frac{3}{4}."""
    forms = [unicodedata.normalize("NFKC", char).replace("−", "-") for char in mark[0]]
    if "⁄" in forms[0]:
        return r"\frac{%s}{%s}" % tuple(forms[0].split("⁄"))
    return ("_{%s}" if "<sub>" in unicodedata.decomposition(mark[0][0]) else "^{%s}") % "".join(forms)

def clean(text):
    """One spelling for one answer: `text` (str) without delimiters, fonts, sizes and idle spaces."""
    text = re.sub("[¼-¾⅐-⅞]|[⁰-⁹⁺⁻ⁿ¹²³]+|[₀-₉]+", small_digits, text)
    if re.search(r"\\(?:vec|mathbf|overrightarrow|hat)", text):
        text = text.replace("\\times", "⨯")  # of vectors the cross product: it does not commute
    text = text.translate(UNICODE)
    if "\\begin" not in text:
        text = text.replace("\\\\", "\\")  # doubly escaped LaTeX; in a matrix it ends a row
    text = re.sub(r"\\(?:text|mathrm|mbox)\s*\{\s*([gmshL])\s*\}",  # a bare m may be a letter
                  lambda mark: f" {UNIT_LETTERS[mark[1]]} ", text)
    text = re.sub(r"\\mathbb\s*\{?R\}?", "ℝ", text)
    for _ in range(3):  # fonts inside fonts
        text = FONT.sub(r" \1 ", text)
    text = re.sub(r"\\([A-Za-z]+)", lambda mark: SYMBOLS.get(mark[1], mark[0]), text)
    for pattern, new in REWRITES:
        text = pattern.sub(new, text)
    for mark in reversed(list(re.finditer(r"\\?(?<![A-Za-z])(sqrt|exp|floor|ceil|abs)\(", text))):
        end = closing(text, mark.end() - 1)
        if end > 0:
            text = text[:mark.start()] + SPELLED[mark[1]] % text[mark.end():end] + text[end + 1:]
    return strip_edges(text)

# ---------------------------------------------------------------- 3. computer algebra, in its own process
WORKER_LOCK = threading.Lock()
BUDGET = threading.local()  # .end: when the answer that this thread grades has to be decided

def ask_worker(*question):
    """same_value(*question), in the worker; out of time, out of memory or broken is False."""
    count_event("symbolic")
    with WORKER_LOCK:
        seconds = max(0.1, BUDGET.end - time.monotonic())
        try:
            if not WORKER or WORKER[0].poll() is not None:
                start_worker()
            if not WORKER[0].is_ready:  # the import of sympy is not charged to the answer
                WORKER[0].is_ready = bool(worker_line(120))
            WORKER[0].stdin.write(json.dumps(question) + "\n")
            WORKER[0].stdin.flush()
            verdict = json.loads(worker_line(seconds))
        except (OSError, ValueError):
            verdict = None
            start_worker()  # imports sympy while the next answers are being compared
    if verdict is None:
        count_event("timeouts")
    if isinstance(verdict, str):
        count_event("errors", f"{verdict} on {question}")
    return verdict is True

# ---------------------------------------------------------------- 4. comparing by kind
# Every rule gets (gold, answer), both cleaned, and says True, False, or None: another rule has to decide.
UNITS = {name: group.split()[0] for group in """inch in inche; foot ft feet; yard yd; mile mi;
cm centimeter centimetre; meter m metre; mm millimeter; km kilometer kilometre; gram g gm; kilogram kg;
pound lb £; ounce oz; second s sec; minute min; hour h hr; liter litre; gallon; quart; cup; ton; acre; mph;
person people; man men; woman women; child children; dollar $; cent; euro €; yen ¥; rupee ₹; peso; celsius;
fahrenheit; degree; year; day; week; month; oclock; unit; student; boy; girl; player; team; friend; worker;
apple; orange; book; page; pencil; marble; ball; coin; penny pennie; nickel; dime; card; cookie; candy candie;
ticket; toy; car; bus buse; tile; bag; box boxe; bottle; egg; flower; tree; animal; dog; cat; chicken; cow;
fish; way; edge; face; side; vertex vertice; diagonal; point; line; triangle; solution; root; number; integer;
digit; value; word; letter; game; vote; question; problem; step; term; element; subset; outcome; choice;
combination; permutation; arrangement; path; route; color; match matche; handshake; lap; trip; block; seat;
house; shirt; square sq squared 2; cubic cu cubed cube 3""".replace(
    "\n", " ").split(";") for name in group.split()}
UNIT_LETTERS = {"g": "grams", "m": "meters", "s": "seconds", "h": "hours", "L": "liters"}
COUNTS = re.compile(r"\b(?:\w*(?:hundred|thousand|.illion|lakh|crore|dozen|score|pair|quarter|percent)s?|"
                    r"tens|ones|halves|thirds|squared|cubed|times|\w*[rfxnhd]ths)\b")  # these are no units
PRODUCT = "[abxyzmnpqrst]{2}|[xyz]{3}"  # letters alone that are a product; no, on, IV, HT are text
LETTER = r"(?:[A-Za-z]|\\[a-z]+)(?:_\w+)?"
NAME = (rf"(?!not )(?:m?\\angle ?)?(?:[A-Za-z][A-Za-z ]*\d*'*|{LETTER})(?:\^\{{-1\}})?(?:\([A-Za-z0-9,]+\))?"
        r"|\([a-zA-Z](?:,[a-zA-Z])+\)")
RELATION = re.compile("[=<>≤≥≠≈∈≡]")
# Products of capital letters may be of matrices, which do not commute; P(A)P(B) does.
MATRICES = r"[A-Z](?!\([A-Za-z\d]\))(?:\*|\^\{[^{}]*\}| )?[A-Z(]|[A-Z]\^\{-1\}|[-+A-Z][A-Z]\)+[(^A-Z]"
SEPARATORS = ",;∧∨"

def split_unit(text, trusted=False):
    """'5miles per hour' -> ('5', 'mile/hour'); (text, '') without a known unit; `trusted`: any word."""
    if found := fullmatch_ascii(r"(-?)([$€£¥₹])([^$]+)\$?|([^$]+)([$€£¥₹])", text):
        return (found[1] or "") + (found[3] or found[4]), UNITS[found[2] or found[5]]
    if text[-1:] in ("°", "%") and number(text[:-1]) is not None:
        return text[:-1], "degree" if text[-1] == "°" else "%"
    found = fullmatch_ascii(r"(.*?[\d)}π.])[- ]?([A-Za-z][A-Za-z/][A-Za-z ./]*(?:\^\{[23]\})?)", text)
    phrase = re.sub(r"\bper\b", "/", found[2].lower()) if found and number(text) is None else ""
    sides = []
    for side in phrase.split("/"):
        words = [UNIT_LETTERS.get(word, word) for word in re.findall("[a-z]+|[23]", side)]
        known = [UNITS.get(word) or UNITS.get(word.removesuffix("s")) or (
            word.removesuffix("s") if trusted and len(word) > 3 else "") for word in words]
        sides.append(" ".join(sorted(known)))
        if not all(known) or set(known) <= {"square", "cubic"} or len(known) > 4 or COUNTS.search(phrase):
            return text, ""
    return found[1], "/".join(sides)

def same_words(gold, answer):
    """Choice letters, numbers in a base, times and words, without case, spaces and brackets."""
    if fullmatch_ascii("[A-Z]", gold):  # (C), C: 12, option C; not "C or D", "not C"
        choice = r"(?:(?:[Oo]ption|[Cc]hoice) ?)?\(?([A-Z])(?:[).:][^()A-Z;,∧∨=^+*/-]*)?"
        found = fullmatch_ascii(choice, answer)
        return found[1] == gold and not re.search(r"\b(is|not)\b", answer) if found else None
    if found := fullmatch_ascii(r"(-?[0-9A-Z.]*\d[0-9A-Z.]*)_\w+", gold):
        return answer in (gold, found[1])  # 2516_8 is 2516 where the base went without saying, but not 25168
    time_of_day = fullmatch_ascii(r"\d+(:\d\d)? ?[AaPp]\.?[Mm]", gold)
    body = re.sub(r"\\(?:overline|triangle|angle|vec|(?:over|left)*rightarrow)(?![a-z])", "", gold)
    formula = re.search(rf"[=<>≤≥+*/^$\\π|!∖∪{SEPARATORS}]|\d ?[a-z]", body) or fullmatch_ascii(PRODUCT, body)
    if not time_of_day and (formula or not re.search("[A-Za-z]{2}", body)):
        return None
    idle = re.compile(r"\\(?:overline|triangle|angle)(?![a-z])|[\s.'\"(){}]")
    return idle.sub("", gold).lower() == idle.sub("", answer).lower()

def split_name(text):
    """'x=5' -> ('x', '5'), '5' -> ('', '5'), '2x=5' -> (None, '2x=5'): an equation, not a named value."""
    name, relation, value = re.sub("[∈≈]", "=", text).partition("=")
    if relation and fullmatch_ascii(LETTER, value) and not re.search("[A-Za-z]", name):
        name, value = value, name  # 5=x
    if fullmatch_ascii(NAME, name) and relation and not RELATION.search(value):
        return name, value
    return None if RELATION.search(text) else "", text

def named(text):
    """'x=1,y=2' or '(x,y)=(1,2)' as {name: value}; {} if there are not two different names."""
    parts = [split_name(part) for part in split_top(text, ",;∧")]
    if len(parts) == 1 and parts[0][0] and parts[0][0][0] == "(" and wrapped(parts[0][1]):
        parts = list(zip(parts[0][0][1:-1].split(","), split_top(parts[0][1][1:-1], ",;")))
    pairs = dict(parts)
    return pairs if len(pairs) == len(parts) > 1 and all(pairs) else {}

def same_named(gold, answer):
    """x=5 against 5 or x=5; with two names they must be the same one. Several names in order are a tuple."""
    one, two = named(gold), named(answer)
    if one and two:
        return one.keys() == two.keys() and all(equal(value, two[name]) for name, value in one.items())
    if one or two:
        pairs, other = (one, answer) if one else (two, gold)
        items = split_top(other[1:-1] if wrapped(other) and other[0] == "(" else other, ",;∧")
        values = [pairs[name] for name in (sorted(pairs) if pairs.keys() <= {*"xyz"} else pairs)]
        return len(items) == len(values) and all(map(equal, *((values, items) if one else (items, values))))
    (gold_name, gold_value), (name, value) = split_name(gold), split_name(answer)
    if gold_name and not has_letters(gold_value) and name not in ("", gold_name):
        return False  # x=5 is neither y=5 nor 2x=10
    if None in (gold_name, name) or len({gold_name, name, ""}) != 2:
        return None
    return equal(gold_value, value) or None

def solution_set(text):
    """Conditions on one letter as the reals they describe: 'x<1∨2≤x<3' is '(-∞,1)∪[2,3)'; else `text`."""
    text = re.sub(r"^⦃[^⦃]*?[:|](.*)⦄$|^⦃([(\[].*[∪∞].*[)\]]|\[[^()[\]]*\)|\([^()[\]]*\])⦄$", r"\1\2", text)
    names, union = set(), []
    for alternative in split_top(text, "∨∪") if re.search("[<>≤≥≠ℝ]", text) else []:
        low, high, holes = [("-∞", "(")], [("∞", ")")], []
        for part in split_top(alternative, ",;∧"):
            chain = rf"(?:([^<=≤]+)([<≤]))?({LETTER})(?:([<≤])([^<=≤]+))?"
            chain = fullmatch_ascii(chain, "".join(turned(part))) if re.search("[<>≤≥]", part) else None
            missing = fullmatch_ascii(rf"({LETTER})≠(.+)|(?:{LETTER}∈)?ℝ(?:∖⦃?([^⦃⦄]*)⦄?)?", part)
            if not chain and not missing:
                return text
            if chain:
                low += [(chain[1], "(["[chain[2] == "≤"])] if chain[1] else []
                high += [(chain[5], ")]"[chain[4] == "≤"])] if chain[5] else []
            holes += container(missing[2] or missing[3])[1] if missing and (missing[2] or missing[3]) else []
            names.add((chain and chain[3]) or (missing and missing[1]) or "")
        places = {end: number(end) for end in [*holes, *(end for end, _ in low[1:] + high[1:])]}
        if None in places.values() and (len(holes) > 1 or len(low) > 2 or len(high) > 2):
            return text  # which end comes first cannot be told
        low = max(low[1:] or low, key=lambda end: (places.get(end[0]) or 0, end[1] == "("))
        high = min(high[1:] or high, key=lambda end: (places.get(end[0]) or 0, end[1] == "]"))
        if None in (places.get(low[0]), places.get(high[0])) or places[low[0]] < places[high[0]]:
            ends = [low[0], *sorted(holes, key=places.get), high[0]]
            opening, closing = [low[1]] + ["("] * len(holes), [")"] * len(holes) + [high[1]]
            union += [f"{a}{one},{two}{b}" for a, one, two, b in zip(opening, ends, ends[1:], closing)]
        elif "∧" not in alternative and len(split_top(alternative, ",;")) == 2:  # "x<1, x>2": either
            union += [f"(-∞,{high[0]}{high[1]}", f"{low[1]}{low[0]},∞)"]
    return ("∪".join(union) or "∅") if names and len(names - {""}) < 2 else text

def container(text):
    """(kind, elements): a matrix, tuple, interval, union, or a list or set, in which ± makes two elements."""
    table = r"\\begin\{([pbv]?matrix|array)\}(?:\{[lcr|]+\})?(.*)\\end\{\1\}"
    if found := fullmatch_ascii(table, text.strip("()[]")):
        rows = [row.split("&") for row in re.split(r"\\\\(?:\[[\d.]*[a-z]+\])?", found[2]) if row]
        return f"{'v' in found[1]} matrix {[len(row) for row in rows]}", sum(rows, [])
    if number(split_unit(text)[0]) is not None:  # 32,348 is one number
        return "list", [text]
    if len(split_top(text, "∪")) > 1:
        return "union", split_top(text, "∪")
    inside = split_top(text[1:-1], SEPARATORS) if wrapped(text) else []
    if len(inside) > 1 and text[0] != "⦃":
        return text[0] + text[-1], inside
    elements = []
    for item in inside if text[:1] == "⦃" and inside else split_top(text, SEPARATORS):
        elements += {item.translate(str.maketrans("±∓", signs)) for signs in ("+-", "-+")}
    return "list", elements

def same_container(gold, answer):
    """Element by element; order counts except in unions, lists and sets. One gold value is never two."""
    (kind, one), (other_kind, left) = container(gold), container(answer)
    if (one, left) == ([gold], [answer]):
        return None
    if all(fullmatch_ascii(r"\(?[A-Z]\)?|.*[A-Za-z]{3}.*", item) for item in one):  # choices and words
        left = list(answer) if fullmatch_ascii(f"[A-Z]{{{len(one)}}}", answer) else left
    stated = any(re.search("[<>≤≥≠]|[A-Za-z]{3}|^[A-Z]$", item) for item in one)
    if stated and ("∨" in gold) != ("∨" in answer):
        return False  # of numbers, "1 or 2" is "1, 2"; of conditions and choices it is not
    if (kind, other_kind) == ("()", "list") and answer[0] != "⦃" and "±" not in answer:
        other_kind = kind  # 1,2 for the gold (1,2)
    if kind != other_kind or len(one) != len(left) or len(one) > MAX_ITEMS:
        return False
    if kind not in ("list", "union"):
        return all(map(equal, one, left))
    for item in one:
        match = next((other for other in left if equal(item, other)), None)
        if match is None:
            return False
        left.remove(match)
    return True

def same_amount(gold, answer):
    """All else, by value: numerals exactly, formulas, equations and inequalities by computer algebra."""
    (gold, gold_unit), (value, unit) = split_unit(gold, True), split_unit(answer)
    answer = answer if unit == "degree" and "π" in gold else value
    one, two = number(gold), number(answer)
    if gold_unit and unit not in ("", gold_unit):
        return False
    if one is not None and (two is not None or one.denominator == 1):  # 10/2 and \sqrt{25} are not yet 5
        if gold_unit == "%" and not unit and one == 100 * (two or 0):
            return True  # 0.28 is 28%
        ratio = re.search(r"/|\\frac|:", answer) is not None
        return one == two and (ratio if ":" in gold else one.denominator > 1 or not ratio)
    if not re.search(r"[a-z=]", gold) and re.search(MATRICES, gold):
        return gold.replace(" ", "") == answer.replace(" ", "")  # products of matrices do not commute
    (left, *rest), (other, *more) = turned(gold), turned(answer)
    if rest[::2] != more[::2] or has_letters(gold) < has_letters(answer) or (
            fullmatch_ascii("[A-Za-z]{2,}", answer) and not fullmatch_ascii(PRODUCT, answer)):
        return False
    if len(rest) > 2:
        return all(map(equal, [left, *rest[1::2]], [other, *more[1::2]]))
    question = [latex(f"{side}-({tail[1]})" if tail else side, first)
                for side, tail, first in ((left, rest, 100), (other, more, 500))]
    if None in question or work_left(answer, gold, one is not None) - work_left(gold, gold):
        return False
    return ask_worker(*question, "".join(rest[:1]))

RULES = [same_words, same_named, same_container, same_amount]

def equal(gold, answer):
    """True if the cleaned `answer` says the same as the cleaned `gold`: the first rule that knows decides."""
    pair = []
    for text in (gold, answer):
        while wrapped(text) and text[0] + text[-1] in ("()", "[]"):
            if len(split_top(text[1:-1], SEPARATORS)) > 1:
                break
            text = text[1:-1]  # (5) and [5] are 5; (1,2) and [1,2] stay
        pair.append(solution_set(text))
    if not all(pair) or pair[0].replace(";", ",") == pair[1].replace(";", ","):
        return all(pair)
    return next((verdict for verdict in (rule(*pair) for rule in RULES) if verdict is not None), False)

def tidy(gold, answer):
    """Both cleaned; the answer without a stray brace and '\\approx 1.41', a unit's letter spelled out."""
    if answer.endswith("}") and answer.count("}") == answer.count("{") + 1:
        answer = answer[:-1]
    if not re.search("[A-Za-z]", re.sub(r"\\(?:text|mathrm|mbox) *\{[^{}]*\}|\\[A-Za-z]+", "", gold)):
        answer = re.sub(r"(?<=\d) ([gmshL])$", lambda mark: " " + UNIT_LETTERS[mark[1]], answer)
    gold, answer = clean(gold), clean(answer)
    exact, _, rough = answer.partition("≈")
    if "≈" not in gold and number(rough) is not None and not fullmatch_ascii(NAME, exact):
        value = number(exact)
        answer = exact if value is None or 100 * abs(value - number(rough)) <= abs(value) else answer
    return gold, answer

@functools.lru_cache(100_000)  # pairs repeat a lot: half of the pairs of real rollouts are new
def compare(gold, text, seconds):
    """True if the extracted answer `text` says the same as `gold`; computer algebra gets `seconds`."""
    BUDGET.end = time.monotonic() + seconds
    pair = tidy(gold, text)
    depths = [levels(side) or [0] for side in pair]
    balanced = all(min(side) == side[-1] == 0 and max(side) <= MAX_DEPTH for side in depths)
    return text == gold or (balanced and equal(*pair))

def is_equal(answer, ground_truth, fast=True):
    """True if `answer` (str, LaTeX or plain) says the same as `ground_truth` (str); never raises."""
    gold, text = extract_answer(str(ground_truth)), extract_answer(str(answer))
    try:
        return bool(gold and text) and compare(gold, text, WORKER_SECONDS if fast else 10)
    except Exception as error:  # one strange answer must not end a training run
        count_event("errors", repr(error))
        return False

# ---------------------------------------------------------------- 5. reward functions
def acceptable(ground_truth):
    """The golds (list of str) of a row: a value, a GSM8K solution, a list, tuple, array or JSON list."""
    if isinstance(ground_truth, str) and ground_truth.lstrip().startswith('["'):  # [1, 2] may be an interval
        with contextlib.suppress(ValueError):
            ground_truth = json.loads(ground_truth)
    many = isinstance(ground_truth, (list, tuple, set)) or getattr(ground_truth, "shape", ()) != ()
    golds = [gold for gold in (ground_truth if many else [ground_truth]) if gold is not None]
    return [gold for gold in (str(gold).rpartition("####")[2].strip() for gold in golds) if gold]

def grade(answer, ground_truth, fast=True):
    """Scores of an answer (None: wrong format) by the acceptable golds."""
    right = float(bool(answer) and any(is_equal(answer, gold, fast) for gold in acceptable(ground_truth)))
    return {"format_reward": float(answer is not None), "answer_reward": right, "reward": right}

def ungradable(gold):
    """Why nobody can be right: "empty", "too long", "proof", "sentence" or "unreadable"; None if one of the
    golds can be matched."""
    reasons = []
    for one in acceptable(gold):
        words = re.findall(r"[A-Za-z]{2,}", re.sub(r"\\[A-Za-z]+", " ", one))
        reasons.append("too long" if len(one) > 20 * MAX_ANSWER else
                       "proof" if re.search(r"(?i)\b(proof|proved?|qed)\b", " ".join(words)) else
                       "sentence" if len(words) > 7 else None if is_equal(one, one) else "unreadable")
    return None if None in reasons else [*reasons, "empty"][0]

def r1_zero_answer(response):
    """The answer (str): behind the prompt's <think> one "</think> <answer>" and a last "</answer>". Or None.

    The course also pays for tags that repeat and for text behind them.
    """
    text = response.rstrip()
    tags = [text.count(tag) for tag in ("<think>", "</think>", "<answer>", "</answer>", "</think> <answer>")]
    if tags != [0, 1, 1, 1, 1] or not text.endswith("</answer>"):
        return None
    return text.partition("<answer>")[2].removesuffix("</answer>").strip()

def r1_zero_reward_fn(response, ground_truth, fast=True):
    """{"format_reward", "answer_reward", "reward"}, each 0.0 or 1.0: right answer, strict R1-Zero format."""
    return grade(r1_zero_answer(response), ground_truth, fast)

def question_only_reward_fn(response, ground_truth, fast=True):
    """As r1_zero_reward_fn, for an answer in the last balanced \\boxed{} of the response."""
    return grade(last_boxed(response), ground_truth, fast)

def gsm8k_answer(response):
    """The line behind the last "####", or None."""
    _, marker, answer = response.rpartition("####")
    return answer.strip().partition("\n")[0] if marker else None

def gsm8k_reward_fn(response, ground_truth, fast=True):
    """As r1_zero_reward_fn, for an answer behind the last "####"."""
    return grade(gsm8k_answer(response), ground_truth, fast)

def last_number(response):
    """The last number in the text (str), or None."""
    found = re.findall(r"-?\d[\d,]*(?:\.\d+)?(?:/\d+)?|-?\.\d+", response[-20000:].replace("$", ""), re.ASCII)
    return found[-1].rstrip(",") if found else None

def last_number_reward_fn(response, ground_truth, fast=True):
    """As r1_zero_reward_fn, for the last number in free text; any number is the right format.

    Weak: a date or a check behind the answer is taken for it, and of "\\frac{1}{2}" only the 2 is read.
    """
    return grade(last_number(response), ground_truth, fast)

def countdown_reward_fn(response, ground_truth, fast=True):
    """As r1_zero_reward_fn: an expression, then maybe "= target", has to use each number once and be exact.
    A response without the tag <answer> may have it in its last box.

    ground_truth: dict or JSON text {"numbers": [..], "target": n}; "nums" is understood too.
    """
    task = json.loads(ground_truth) if isinstance(ground_truth, str) else ground_truth
    numbers, target = sorted(map(int, task.get("numbers", task.get("nums")))), Fraction(str(task["target"]))
    answer, right = r1_zero_answer(response) if "<answer>" in response else last_boxed(response), 0.0
    plain = re.sub(r"×|\\times|\\cdot", "*", re.sub(r"÷|\\div", "/", (answer or "")[:MAX_ANSWER]))
    expression, *claimed = plain.split("=")
    with contextlib.suppress(ValueError, ZeroDivisionError):
        value, used = arithmetic(expression)
        right = float(value == target and sorted(used) == numbers and claimed[1:] == []
                      and all(fullmatch_ascii(r"\s*-?\d+\s*", one) and int(one) == target for one in claimed))
    return {"format_reward": float(answer is not None), "answer_reward": right, "reward": right}

def random_reward_fn(response, ground_truth, fast=True):
    """A control: format and answer are measured, "reward" is a fair coin."""
    scores = r1_zero_reward_fn(response, ground_truth, fast)
    with LOCK:
        scores["reward"] = float(RANDOM.random() < 0.5)
    return scores

def seed_random(seed):
    """Restart the coin of random_reward_fn from `seed` (int)."""
    RANDOM.seed(seed)

def integers(text):
    """Whitespace-separated integers as a list; [] if anything else, or too much, stands there."""
    words = str(text or "").split()[:1000]
    return [int(word) for word in words] if all(fullmatch_ascii(r"-?\d{1,9}", word) for word in words) else []

def sort_points(numbers, truth):
    """The lecture's points: one per prompt number found, one per adjacent pair in order. Find the hole."""
    found = sum(number in numbers for number in truth)
    return found + sum(one <= two for one, two in zip(numbers, numbers[1:]))

def sort_positions(numbers, truth):
    """Share of the positions that hold the right number, of the longer list."""
    return sum(one == two for one, two in zip(numbers, truth)) / max(len(numbers), len(truth))

def sort_inclusion(numbers, truth):
    """sort_points as a share of what the right answer earns."""
    return sort_points(numbers, truth) / (2 * len(truth) - 1)

def sort_repaired(numbers, truth):
    """Half for the numbers, each as often as it should be; half for the order, once they are all there."""
    overlap = sum((Counter(numbers) & Counter(truth)).values()) / max(len(numbers), len(truth))
    breaks = sum(one > two for one, two in zip(numbers, numbers[1:])) / max(1, len(numbers) - 1)
    return overlap / 2 if overlap < 1 else 1 - breaks / 2

def sort_reward_fn(share):
    """Reward function of the sort task: `share` sets "reward", the other two stay the plain measurements."""
    def reward_fn(response, ground_truth, fast=True):
        answer = r1_zero_answer(response)
        numbers, truth = integers(answer), integers(ground_truth)
        return {"format_reward": float(answer is not None), "answer_reward": float(numbers == truth != []),
                "reward": float(share(numbers, truth)) if numbers and truth else 0.0}
    return reward_fn

sort_positions_reward_fn = sort_reward_fn(sort_positions)
sort_inclusion_reward_fn = sort_reward_fn(sort_inclusion)
sort_repaired_reward_fn = sort_reward_fn(sort_repaired)
REWARDS = {"r1_zero": r1_zero_reward_fn, "question_only": question_only_reward_fn, "gsm8k": gsm8k_reward_fn,
           "last_number": last_number_reward_fn, "countdown": countdown_reward_fn, "random": random_reward_fn,
           "sort_positions": sort_positions_reward_fn, "sort_inclusion": sort_inclusion_reward_fn,
           "sort_repaired": sort_repaired_reward_fn}

@functools.cache
def load_module(place):
    """A Python file by its path, so that a user's rewards.py is not this module; else a module by name."""
    path = os.path.abspath(place if place.endswith(".py") else place.replace(".", os.sep) + ".py")
    sys.path += [folder for folder in (os.path.dirname(path), os.getcwd()) if folder not in sys.path]
    if not os.path.isfile(path):
        return importlib.import_module(place)
    spec = importlib.util.spec_from_file_location("reward_" + re.sub(r"\W", "_", path), path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # where pickle looks for it
    spec.loader.exec_module(module)
    return module

def load_reward_fn(name):
    """The reward function called `name`: a key of REWARDS, "path/file.py:function" or "module:function"."""
    if name in REWARDS:
        return REWARDS[name]
    place, _, function = name.rpartition(":")
    try:
        return getattr(load_module(place), function)
    except (Exception, SystemExit) as error:
        text = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(f"{name}: {text}; mend the file, or give file.py:function with a path from here, "
                         f"or one of {', '.join(REWARDS)}") from error

def checked_scores(result, response, ground_truth):
    """What a reward function returned, as floats under the three names; RewardError: it cannot be."""
    shown = f"the reward function returned {result!r:.200}; "
    if isinstance(result, dict) and "reward" not in result:
        raise RewardError(shown + 'it has to return a number, or a dict with "reward"')
    scores = result if isinstance(result, dict) else {"reward": result}
    if not {"format_reward", "answer_reward"} <= scores.keys():
        scores = any_format(response, ground_truth) | scores
    try:
        values = [scores[key] for key in ("format_reward", "answer_reward", "reward")]
        scores = dict(zip(("format_reward", "answer_reward", "reward"), map(float, values)))
    except (TypeError, ValueError, RuntimeError):
        values = [""]
    if any(isinstance(value, (str, bytes)) for value in values):
        raise RewardError(shown + "each reward has to be one number")
    if any(1 < abs(2 * scores[key] - 1) < float("inf") for key in ("format_reward", "answer_reward")):
        raise RewardError(shown + "answer_reward and format_reward have to be from 0 to 1")
    return scores

def grade_answers(responses, ground_truths, reward_fn):
    """Scores of a batch: list of {"format_reward", "answer_reward", "reward"}. Safe to call from threads.

    Where a `reward_fn` returns a number, or a dict without the other two, `any_format` gives them: accuracy
    stays accuracy, whatever is rewarded. One that raises or gives NaN scores 0, counted in STATS["errors"].
    RewardError: what it returned cannot be trained on.
    """
    scores = []
    for response, ground_truth in zip(responses, ground_truths, strict=True):
        count_event("graded")
        try:
            result, failure = reward_fn(response, ground_truth), ""
        except Exception as error:
            result, failure = float("nan"), repr(error)
        result = checked_scores(result, response, ground_truth)
        if not all(abs(value) < float("inf") for value in result.values()):  # NaN spoils the weights
            count_event("errors", failure or f"not finite: {result}")
            result = dict.fromkeys(result, 0.0)
        scores.append(result)
    return scores

def any_format(response, ground_truth):
    """Scores in the format that the response itself shows: R1-Zero tags, else a box, else "####"."""
    if "<answer>" in response:
        return r1_zero_reward_fn(response, ground_truth)
    return (question_only_reward_fn if "\\boxed" in response else gsm8k_reward_fn)(response, ground_truth)

# ---------------------------------------------------------------- 6. the doors for TRL and verl
def whole_completion(response, ground_truth):
    """any_format for trainers whose completions have their own <think>."""
    return any_format(response.lstrip().removeprefix("<think>"), ground_truth)

def trl_reward(completions, ground_truth=None, **kwargs):
    """Reward function for TRL's GRPOTrainer: list of floats, None for a row without a gold.

    Golds are the dataset's column ground_truth, answer or solution.
    """
    columns = (ground_truth, kwargs.get("answer"), kwargs.get("solution"))
    golds = next((column for column in columns if column is not None), None)
    if golds is None:
        raise ValueError("trl_reward needs a dataset column called ground_truth, answer or solution")
    texts = [text if isinstance(text, str) else text[-1]["content"] for text in completions]
    scores = grade_answers(texts, golds, whole_completion)
    return [one["reward"] if acceptable(gold) else None for one, gold in zip(scores, golds)]

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """verl's custom reward function: {"score", "acc", "format"} (floats) of one response."""
    scores = grade_answers([solution_str], [ground_truth], whole_completion)[0]
    return {"score": scores["reward"], "acc": scores["answer_reward"], "format": scores["format_reward"]}

# ---------------------------------------------------------------- 7. shaping
def kimi_length_rewards(lengths, is_right):
    """Kimi k1.5, one prompt's answers (tokens, right?): short right ones gain up to .5, long ones lose."""
    shortest, longest = min(lengths), max(lengths)
    if shortest == longest:
        return [0.0] * len(lengths)
    gains = [0.5 - (length - shortest) / (longest - shortest) for length in lengths]
    return [gain if right else min(0.0, gain) for gain, right in zip(gains, is_right)]

def soft_overlong_punishment(length, max_tokens, cache):
    """DAPO: 0.0 up to max_tokens - cache tokens, then a straight line down to -1.0 at max_tokens."""
    return min(0.0, max(-1.0, (max_tokens - cache - length) / cache))

SCRIPTS = {"zh": ("CJK",), "ja": ("CJK", "HIRAGANA", "KATAKANA"), "ko": ("HANGUL",), "ru": ("CYRILLIC",)}

def language_consistency(text, language="en"):
    """R1: share (0.0 to 1.0) of the words in the script of `language`; formulas and digits are not words."""
    text = re.sub(r"\$[^$]*\$|\\\([^)]*\\\)|\\\[[^\]]*\\\]|\\[A-Za-z]+", " ", text)
    words = re.findall(r"[\u3040-\u30ff\u3400-\u9fff]|[^\W\d_\u3040-\u30ff\u3400-\u9fff]+", text)
    scripts = SCRIPTS.get(language, ("LATIN",))
    return sum(unicodedata.name(word[0], "").startswith(scripts) for word in words) / max(1, len(words))

