"""Exact numbers and computer algebra: all that the judge in rewards.py has to compute.

(1) brackets, numbers and signs, read from cleaned LaTeX, (2) a formula as math-verify's reader takes it,
(3) its value at many points. Part 3 runs in a process of its own, which rewards.py starts, asks and kills:
the reader and sympy are slow, and on some formulas endless. Model text is never run or parsed as Python.
"""
import atexit
import contextlib
import functools
import itertools
import json
import math
import os
import random
import re
import subprocess
import sys
import threading
import time
from fractions import Fraction

MEMORY = 1 << 30  # bytes of address space of the worker

# ---------------------------------------------------------------- 1. brackets, numbers and signs
def fullmatch_ascii(pattern, text):
    """re.fullmatch with ASCII digits: digits of other scripts are not how answers are written."""
    return re.fullmatch(pattern, text, re.ASCII)

def levels(text):
    """For every character of `text`, how many brackets are open behind it. Kinds may mix, as in [2,5)."""
    return list(itertools.accumulate((char in "([{⦃") - (char in ")]}⦄") for char in text))

def closing(text, start):
    """Index of the bracket that closes the one at text[start], or -1."""
    return next((start + at for at, level in enumerate(levels(text[start:])) if level == 0), -1)

def split_top(text, separators):
    """`text` cut at those characters of `separators` that stand outside all brackets."""
    cuts = [at for at, level in enumerate(levels(text)) if level == 0 and text[at] in separators]
    return [text[start + 1:end] for start, end in zip([-1] + cuts, cuts + [len(text)])]

def wrapped(text):
    """True if one pair of brackets encloses the whole text: (1,2] yes, (1)(2) no."""
    return text[:1] in tuple("([⦃") and text[-1] in ")]⦄" and 0 not in levels(text)[:-1]

NUMERAL = r"(\d+(?:\.\d*)?|\.\d+)"
FRACTION = rf"\(?([+-]?{NUMERAL})\)?[/:]\(?([+-]?{NUMERAL})\)?"

def number(text):
    """The value of a numeral as a Fraction, else None: sums, roots and powers are arithmetic left to do.

    Numerals: 12, -1,234.50, 1 000, 3/4, 3:4, \\frac{3}{4}, 2\\frac{1}{2}, 3*10^{8}, 2e5, 0.\\overline{3}.
    """
    sign = -1 if text.startswith("-") else 1
    body = re.sub(r"\\frac\{([^{}]*)\}\{([^{}]*)\}", r" \1/\2", re.sub(r"^[+-]", "", text)).strip()
    if fullmatch_ascii(r"\d{1,3}(,\d{3})+(\.\d+)?|\d{1,3}( \d{3})+", body):
        body = re.sub("[, ]", "", body)
    if fullmatch_ascii(NUMERAL, body):
        return sign * Fraction(body)
    if found := fullmatch_ascii(rf"(?:(\d+)[+ ] ?)?{FRACTION}", body):
        whole, top, bottom = [Fraction(part or 0) for part in found.group(1, 2, 4)]
        proper = 0 < top < bottom and top.denominator == bottom.denominator == 1  # not "4 10/3"
        return sign * (whole + top / bottom) if bottom and (proper or not found[1]) else None
    body = re.sub(r"(?<=\d)[eE]([+-]?\d+)$", r"*10^{\1}", body)
    body = re.sub(r"(?<=\d),(?=\d{3}\*)", "", body)
    if found := fullmatch_ascii(rf"(?:{NUMERAL}\*)?10\^\{{([+-]?\d{{1,3}})\}}", body):
        return sign * Fraction(found[1] or 1) * Fraction(10) ** Fraction(found[2])
    if found := fullmatch_ascii(r"(\d*)\.(\d*)\\overline\{(\d+)\}", body):
        whole, fixed, cycle = found.groups()
        repeated = Fraction(cycle) / ((10 ** len(cycle) - 1) * 10 ** len(fixed))
        return sign * (Fraction(f"{whole or 0}.{fixed or 0}") + repeated)
    return None

def turned(text):
    """A formula, equation or chain of inequalities, cut at its signs; one with '>' is turned round."""
    parts = re.split("([=<>≤≥≠])", text)
    if {">", "≥"} & {*parts[1::2]}:
        parts = [part.translate(str.maketrans(">≥<≤", "<≤>≥")) for part in reversed(parts)]
    return parts

def arithmetic(text):
    """(value as a Fraction, numbers used) of numbers, + - * / and parentheses; ValueError for all else."""
    tokens, used = re.findall(r"\d+|\S", text), []

    def take(level):
        if level == 2 and tokens[:1] == ["("]:
            tokens.pop(0)
            value = take(0)
            if not tokens or tokens.pop(0) != ")":
                raise ValueError("a bracket is left open")
            return value
        if level == 2:
            used.append(int("".join(tokens[:1])))  # ValueError: no number
            return Fraction(int(tokens.pop(0)))
        value = take(level + 1)
        while tokens and tokens[0] in ("+-", "*/")[level]:
            sign, other = tokens.pop(0), take(level + 1)
            value = value * other if sign == "*" else value / other if sign == "/" else (
                value + other if sign == "+" else value - other)
        return value
    value = take(0)
    if tokens or not text.isascii():
        raise ValueError("text is left over")
    return value, used

# ---------------------------------------------------------------- 2. formulas for the reader
def has_letters(text):
    """True if a formula has a letter that stands for a number: not e, i, π or a function's name."""
    return bool(re.search("[A-Za-z]", re.sub(r"\\[A-Za-z]+|[ei]", "", text)))

# Functions that an answer with letters may bring in, though the gold has none.
FREE = {"\\" + name for name in """sin cos tan cot sec csc arcsin arccos arctan arccot arcsec arccsc log
max min gcd lcm lfloor rfloor lceil rceil mod""".split()}

def work_left(text, gold, numeric=False):
    """Kinds of arithmetic that `text` leaves undone; an answer may have none that its `gold` lacks."""
    free = FREE if has_letters(gold) else set()
    left = set(re.findall(r"\\[a-z]+|!", text.replace("\\ln", "\\log"))) - {"\\frac", "\\sqrt"} - free
    if numeric:  # (3/4)^4 and its complement may stand for a fraction, 1/2+1/3 and 1/2*1/3 may not
        return left | set(re.findall(r"[\w)}][-+]|\*|[)}][\\(]|\d\(", re.sub("^1-", "", text)))
    terms = [term for term in split_top(text, "+-") if term]
    if len(terms) > 1 and any(wrapped(term) and re.search(".[+-]", term) for term in terms):
        left.add("sum of sums")  # (2x+3)+(4x-5): the question copied
    return left | set(re.findall(r"\(-?\d+\)\(-?\d+\)|(?<![\w.}^])\d+\*\d+(?![\d.^!])", text))

# WILD: towers, huge numbers and factorials, words and lists, not fit for computer algebra.
WILD = re.compile(r"[^\w+*/^(){}|!.π°\\ \[\]-]|(?<!sqrt)\[|(?<!_)\d \d|--|_\w?_|\d\\frac\{\d|\d{31}"
                  r"|\^\{[^{}]*\^|\}\^|\^\{-?\d{4}|\d{3}\)?!|![)}]*!|(?<![\\A-Za-z])[A-Za-z]{4}"
                  r"|(?<![\\A-Za-z])(?=[A-Za-z]{0,2}[eiou])[A-Za-z]{3}", re.ASCII)
CALL = re.compile(r"\\(gcd|lcm|max|min|Abs)[(⦃]|(?<!\\)(e)\^\{|"
                  r"(?<![A-Za-z\\])([fgh](?:\^\{-?\d+\})?|[A-Z](?=\([A-Za-z\d]\)))\(")

def bars(text):
    """|x|-2|y| as \\Abs(x)-2\\Abs(y): a bar closes where one is open and a value has ended, else it opens."""
    result, still_open = "", 0
    for char in text:
        if char == "|" and still_open and re.match(r"[\w)}!°π]", result.rstrip()[-1:]):
            result, still_open = result + ")", still_open - 1
        elif char == "|":
            result, still_open = result + "\\Abs(", still_open + 1
        else:
            result += char
    return text if still_open else result

def latex(text, first):
    """A cleaned formula as (LaTeX, [[placeholder, function, arguments]]) for same_value; None if it is WILD.

    Placeholders, numbered from `first`, stand for |x|, max(a,b), e^{x}, f(x), which the reader would misread.
    """
    calls, text = [], re.sub(r"_(\d\d+)", r"_{\1}", bars(text))
    text = re.sub(r"(\d*)\.(\d+)", lambda mark: rf"\frac{{{mark[1]}{mark[2]}}}{{{10 ** len(mark[2])}}}", text)
    text = re.sub(r"(?<![A-Za-z\\])([fgh]\^\{-1\})(?!\()", r"\1(0)", text)  # f^{-1} is not 1/f
    while marks := list(CALL.finditer(text)):
        if len(calls) == 12:
            return None
        mark, end = marks[-1], closing(text, marks[-1].end() - 1)
        parts = split_top(text[mark.end():end], ",")
        calls.append([f"Omega_{{{first + len(calls)}}}", mark[mark.lastindex], parts])
        text = f"{text[:mark.start()]}\\{calls[-1][0]} {text[end + 1:]}"
    return None if any(WILD.search(part) for part in [text, *sum((call[2] for call in calls), [])]) else (
        readable(text), [[name, function, list(map(readable, parts))] for name, function, parts in calls])

def readable(text):
    """A formula for math-verify's reader; a letter before a bracket is a factor, not a function."""
    text = re.sub(r"(\d+)°", r"(\1\\frac{π}{180})", text).replace("π", "\\pi ").replace("*", "\\cdot ")
    factor = re.compile(r"\\[A-Za-z]+|([A-Za-z])\(")
    return factor.sub(lambda mark: f"{mark[1]}\\cdot (" if mark[1] else mark[0], text)

# ---------------------------------------------------------------- 3. values
@functools.cache
def algebra():
    """(mpmath with 120 digits, power, {name: function}): what a formula may apply to Fractions and reals.

    Exact where it can be. ArithmeticError: no value there (a pole), or too large to be known exactly.
    """
    from mpmath import mp
    mp.dps = 120
    tiny = {digits: mp.mpf(f"1e-{digits}") for digits in (60, 90, 100)}

    def near(value):  # the nearest whole number, and whether only rounding keeps the value from it
        if not isinstance(value, Fraction) and abs(value) > 10 ** 50:
            raise ArithmeticError
        whole = round(value) if isinstance(value, Fraction) else int(mp.nint(value))
        return whole, mp.mpmathify(abs(value - whole)) < tiny[60]

    def floor(value):
        whole, same = near(value)
        return Fraction(whole if same or value > whole else whole - 1)

    def of_integers(function, largest):
        def checked(*values):
            if not all(near(value)[1] and (not largest or 0 <= value <= largest) for value in values):
                raise ArithmeticError
            return Fraction(function(*(near(value)[0] for value in values)))
        return checked

    def power(base, exponent, constant=False):
        exact = isinstance(exponent, Fraction)
        if base == 0 and mp.mpmathify(exponent).real > 0:
            return Fraction(0)
        if exact and exponent.denominator == 1 and abs(exponent) <= 3000:
            return base ** int(exponent)
        if constant and exact and exponent.denominator % 2 and mp.mpmathify(base).real < 0:
            return (-1) ** exponent.numerator * power(-base, exponent)  # an odd root of a negative number
        if base == 0 or abs(exponent * mp.log(abs(base))) > 10 ** 6:
            raise ArithmeticError
        return mp.power(base, exponent)

    def add(*values):
        total, size = sum(values), max(abs(mp.mpmathify(value)) for value in values)
        return total if isinstance(total, Fraction) or abs(total) > size * tiny[90] else Fraction(0)

    def periodic(function):
        def bounded(angle):
            value = function(angle) if abs(angle) < 10 ** 50 else mp.inf
            return value if abs(value) > tiny[100] else Fraction(0)
        return bounded

    table = {name: getattr(mp, name) for name in "asin acos atan asec acsc acot sinh cosh tanh".split()}
    table |= {name: periodic(getattr(mp, name)) for name in "sin cos tan sec csc cot".split()}
    table |= {"gcd": of_integers(math.gcd, 0), "lcm": of_integers(math.lcm, 0), "Abs": abs, "floor": floor,
              "factorial": of_integers(math.factorial, 3000), "binomial": of_integers(math.comb, 3000),
              "ceiling": lambda value: -floor(-value), "Add": add, "Mul": lambda *values: math.prod(values),
              "Pi": lambda: +mp.pi, "Exp1": lambda: +mp.e, "e": lambda value: power(+mp.e, value),
              "log": lambda value, base: mp.log(value) / mp.log(base),
              "Mod": lambda one, two: one - two * floor(one * power(two, Fraction(-1))),
              "max": lambda *values: max(values, key=mp.mpmathify),
              "min": lambda *values: min(values, key=mp.mpmathify)}
    return mp, power, table | {"Max": table["max"], "Min": table["min"], "exp": table["e"]}

def evaluate(node, point):
    """A sympy formula at `point`, {letter: number, or (function, arguments)}: a Fraction, or mpmath's number.

    Over the reals, unless the point has an i. ValueError: not real. ArithmeticError: as in algebra().
    """
    mp, power, functions = algebra()
    if node.is_Rational:
        return Fraction(node.p, node.q)
    if node.is_Symbol and not isinstance(point[node.name], tuple):
        return point[node.name]
    name, parts = point[node.name] if node.is_Symbol else (node.func.__name__, node.args)
    values = [evaluate(part, point) for part in parts]
    if name == "Pow":
        result = power(*values, node.exp.is_Rational)
    elif name in functions:
        result = functions[name](*values)
    else:  # f, P, f^{-1}: of a function of which nothing is known, a value is anything, but always the same
        key = name, *(mp.nstr(mp.mpmathify(value), 40) for value in values)
        result = Fraction(random.Random(str(key)).randint(-10 ** 9, 10 ** 9), 10 ** 6)
    if isinstance(result, mp.mpc) and "i" not in point:
        raise ValueError("not real")
    if not isinstance(result, Fraction) and not mp.isfinite(result):
        raise ArithmeticError
    return result

def draw(coin, whole, near):
    """A random Fraction for a letter: of either sign, small or large, or close to one of `near`."""
    sign, anchor = coin.choice((1, -1)), coin.choice(near) * coin.choice((1, -1))
    large = sign * Fraction(int(10 ** coin.uniform(0, 5)), 1 if whole else 10)
    if whole:
        beside = round(anchor) * coin.randint(1, 12) + coin.randint(-1, 1)
        return Fraction(coin.choice((coin.randint(-12, 12), coin.randint(-300, 300), large, beside)))
    fine, coarse = Fraction(coin.randint(-1000, 1000), 1000), Fraction(coin.randint(-96, 96), 8)
    return coin.choice((fine, coarse, Fraction(round(coarse)), large, anchor, anchor + fine))

def points(letters, nodes, names):
    """Points at which formulas of these `letters`, sympy `nodes` and function `names` are compared."""
    numbers = [Fraction(node.p, node.q) for node in nodes if node.is_Rational and abs(node) < 10 ** 6]
    roots = any(node.is_Pow and not node.exp.is_integer for node in nodes)
    whole = set()
    signs = any(node.is_Pow and node.base.is_negative for node in nodes)  # (-1)^n
    if signs or names & {"floor", "ceiling", "max", "min"}:
        whole = set("nmkjlNMK") & set(letters)  # these stand for integers where the formula says so
    if names & {"Mod", "gcd", "lcm", "factorial", "binomial"}:
        whole = set(letters)
    for count in range(300 if roots or whole or names - SMOOTH else 40):
        coin, point = random.Random(count), {}
        for letter in letters:
            point[letter] = draw(coin, letter in whole, [*numbers, *point.values(), Fraction(1)])
        if whole and len(letters) == 1 and count < 200:
            point[letters[0]] = Fraction(count - 40)  # all of the first periods
        yield point

WARM = (r"\frac{2x^{2}+\sqrt{x}}{3}-(x+y)\cdot(x-1)y", r"|x-1|+\lfloor\frac{n}{2}\rfloor-\sin^{2}(x)\cos 2x",
        r"(x+1)^{n}(-1)^{n}\ln(x)-\tan(\frac{\pi }{2}-x)", r"-\frac{1}{2}x_1(x+1)-\Omega_{100} x+2\sqrt{3}")
SMOOTH = set("Add Mul Pow Symbol Integer Rational Half NegativeOne One Zero Pi Exp1 sin cos exp e".split())

def read(formula, calls):
    """(sympy formula by math-verify's reader, {placeholder: (function, arguments)}) of what latex() gave."""
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig, latex2sympy
    reader = functools.partial(latex2sympy, conversion_config=ConversionConfig(lowercase_symbols=False))
    return reader(formula), {name: (function, list(map(reader, parts))) for name, function, parts in calls}

def agree(left, right):
    """True if two values are equal, exactly or to 70 digits: 1/2004! is not 1/2006!."""
    if isinstance(left, Fraction) and isinstance(right, Fraction):
        return left == right
    mp = algebra()[0]
    left, right = mp.mpmathify(left), mp.mpmathify(right)
    return abs(left - right) <= mp.ldexp(abs(left) or 2.0 ** -100, -232)

def same_value(gold, answer, relation):
    """In the worker: True if two formulas have the same value, and have one at the same points of the reals.

    `gold` and `answer`: (LaTeX, calls). `relation`: "" for formulas; else both are equations ("=") or
    inequalities, as left minus right side, and one may be a multiple of the other.
    """
    from sympy import preorder_traversal
    try:
        (one, calls), (two, more) = read(*gold), read(*answer)
    except Exception:  # the reader raises bare Exceptions
        return False
    calls |= more
    trees = [one, two, *(part for _, parts in calls.values() for part in parts)]
    nodes = {node for tree in trees for node in preorder_traversal(tree)}
    names = {node.func.__name__ for node in nodes} | {function for function, _ in calls.values()}
    letters = {node.name for node in nodes if node.is_Symbol} - calls.keys()
    calls |= {"i": algebra()[0].mpc(0, 1)} if "i" in letters else {}
    letters, decided, lone_poles, scale = sorted(letters - {"i"}), 0, set(), None
    for point in points(letters, nodes, names):
        values = []
        for tree in (one, two):
            with contextlib.suppress(ArithmeticError):
                try:
                    values.append(evaluate(tree, point | calls))
                except ValueError:
                    values.append(None)
        if len(values) < 2 or values == [None, None]:
            # x^2/x is x but for a point; a pole of one side at many small points is no single point
            if len(values) == 1 and values != [None] and all(abs(number) <= 3 for number in point.values()):
                lone_poles.add(str(point))
            if len(lone_poles) > 5:
                return False
            continue
        if None in values:  # one is real where the other is not
            return False
        decided += 1
        if relation:
            scale = values if scale is None and values[0] != 0 else scale
            values = [values[0] * scale[1], values[1] * scale[0]] if scale else values
            if scale and relation != "=" and scale[0] * scale[1] <= 0:
                return False
        if not agree(*values):
            return False
        if decided >= 8 and not letters:
            break
    return decided >= (8 if letters else 1) and bool(scale or not relation)

def limit(name, value):
    """Set a resource limit of this process, where the system grants it: Windows does not, macOS not all."""
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource
        resource.setrlimit(getattr(resource, name), (value, resource.getrlimit(getattr(resource, name))[1]))

def serve():
    """The worker: answer questions from stdin until the parent closes it or dies."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever the libraries print must not be read as a verdict
    limit("RLIMIT_AS", MEMORY)
    with contextlib.suppress(ImportError):
        for formula in WARM:  # the reader is slow on whatever it meets for the first time
            read(formula, [])
    print("ready", file=out, flush=True)
    for line in sys.stdin:
        limit("RLIMIT_CPU", int(time.process_time()) + 15)  # ends a hang though the parent died
        try:
            verdict = same_value(*json.loads(line))
        except BaseException as error:  # MemoryError and RecursionError too: report, go on
            verdict = f"{type(error).__name__}: {error}"[:300]
        print(json.dumps(verdict), file=out, flush=True)

# ---------------------------------------------------------------- 4. the process
WORKER = []  # at most one, started by the first question

def close_workers():
    """Stop the worker process. The next question that needs one starts a new one."""
    while WORKER:
        process = WORKER.pop()
        process.kill()
        process.communicate()

def start_worker():
    """A fresh interpreter: a process pool does not get a hung worker back, a fork copies a CUDA context."""
    close_workers()
    WORKER.append(subprocess.Popen(
        [sys.executable, os.path.abspath(__file__)], text=True, stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True))  # no Ctrl-C of its own
    WORKER[0].is_ready = False

def worker_line(seconds):
    """Next line of the worker; "" if it died or had to be killed after `seconds`."""
    timer = threading.Timer(seconds, WORKER[0].kill)
    timer.daemon = True  # a signal can end the reading, and the program would wait for the timer
    timer.start()
    line = WORKER[0].stdout.readline()
    timer.cancel()
    return line

atexit.register(close_workers)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=WORKER.clear)  # a forked child must not talk into the parent's pipes

if __name__ == "__main__":
    serve()
