"""Random formulas in pairs, some equal by construction, most nearly so, to try a grader on.

  python tools/random_formulas.py 5000 [SEED]     counts and prints what rewards.py misjudges

The truth comes from numbers alone: thousands of points of both signs by numpy, near ties again by mpmath.
"""
import ast
import functools
import itertools
import math
import operator
import random
import re
import sys
import time
from collections import Counter
from pathlib import Path

import mpmath
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import rewards

# A, B, C: formulas; Q, R: whole numbers; x, y, z: letters for reals; n, m, k: for integers.
EQUAL = """abs(A) = abs(-A); abs(A-B) = abs(B-A); root(2,A**2) = abs(A); root(4,A**4) = abs(A)
abs(A)**2 = A**2; root(4,A**2) = root(2,abs(A)); root(2,A**4) = A**2; abs(A)*abs(B) = abs(A*B)
abs(A)/abs(B) = abs(A/B); root(2,A**2*B**2) = abs(A*B); root(2,x**2+2*Q*x+Q**2) = abs(x+Q)
abs(A**2+Q) = A**2+Q; root(2,x**2-2*x*y+y**2) = abs(x-y); root(2,Q**2*A**2) = Q*abs(A); root(3,A**3) = A
abs(A)**3 = A**2*abs(A); root(2,A**2+2*A*B+B**2) = abs(A+B); max(A,B)*min(A,B) = A*B; max(A,B) = max(B,A)
min(A,B) = min(B,A); max(A,B) = (A+B+abs(A-B))/2; min(A,B) = (A+B-abs(A-B))/2; max(A,B)+min(A,B) = A+B
max(A,B)-min(A,B) = abs(A-B); max(A,-A) = abs(A); min(A,B) = -max(-A,-B); max(A,B,C) = max(C,max(A,B))
max(A,B)+Q = max(A+Q,B+Q); max(Q*A,Q*B) = Q*max(A,B); max(A,A-Q) = A; max(abs(A),-A) = abs(A)
(A+B)**2 = A**2+2*A*B+B**2; (A-B)*(A+B) = A**2-B**2; (x+Q)*(x-R) = x**2+(Q-R)*x-Q*R; A*(B+C) = A*B+A*C
(x+Q)**3 = x**3+3*Q*x**2+3*Q**2*x+Q**3; 1/x-1/(x+Q) = Q/(x*(x+Q)); A/B+C = (A+B*C)/B
x**4-Q**4 = (x**2+Q**2)*(x-Q)*(x+Q); (x+y+z)**2 = x**2+y**2+z**2+2*x*y+2*y*z+2*z*x; exp(-A) = 1/exp(A)
ln(A**2) = 2*ln(abs(A)); ln(exp(A)) = A; ln(A**3) = 3*ln(A); ln(1/A) = -ln(A); exp(A)*exp(B) = exp(A+B)
2**(x+Q) = 2**Q*2**x; 4**x = 2**(2*x); ln(abs(A))+ln(abs(B)) = ln(abs(A*B)); sin(-A) = -sin(A)
cos(-A) = cos(A); sin(2*A) = 2*sin(A)*cos(A); cos(2*A) = 1-2*sin(A)**2; cos(2*A) = 2*cos(A)**2-1
tan(A) = sin(A)/cos(A); tan(A)**2+1 = sec(A)**2; sin(A+pi/2) = cos(A); sin(A)**2 = (1-cos(2*A))/2
root(2,1-cos(A)**2) = abs(sin(A)); root(2,1-sin(A)**2) = abs(cos(A)); sin(A+B) = sin(A)*cos(B)+cos(A)*sin(B)
sin(A)**2+cos(A)**2+B = B+1; cot(A) = cos(A)/sin(A); tan(arctan(A)) = A; arcsin(-A) = -arcsin(A)
arccos(A) = pi/2-arcsin(A); cos(arcsin(x)) = root(2,1-x**2); sin(arccos(x)) = root(2,1-x**2)
tan(arcsin(x)) = x/root(2,1-x**2); sin(arctan(A)) = A/root(2,1+A**2); arccos(-x) = pi-arccos(x)
arccos(2*x**2-1) = 2*arccos(abs(x)); cos(arctan(A)) = 1/root(2,1+A**2); floor(A+Q) = floor(A)+Q
-floor(-A) = ceil(A); floor(2*x) = floor(x)+floor(x+1/2); floor(floor(x)/Q) = floor(x/Q)
mod(n+Q,Q) = mod(n,Q); ceil(x)+floor(-x)+B = B; floor(abs(floor(A))) = abs(floor(A))
floor((n+Q-1)/Q) = ceil(n/Q); floor(floor(n/Q)/R) = floor(n/(Q*R)); floor(n/2)+floor((n+1)/2) = n
n-floor(n/Q) = ceil((Q-1)*n/Q); floor(n/2)+ceil(n/2) = n; floor((n-1)/Q)+1 = ceil(n/Q); floor((Q*n+1)/Q) = n
mod(n,Q) = n-Q*floor(n/Q); floor(n/3)+floor((n+1)/3)+floor((n+2)/3) = n; (2*n-1+(-1)**n)/4 = floor(n/2)
gcd(n,m) = gcd(m,n); gcd(n,n+m) = gcd(n,m); gcd(Q*n,Q*m) = Q*gcd(n,m); gcd(n,n+2) = gcd(n,2)
max(floor(n/2),ceil(n/2)) = ceil(n/2); floor(n/Q)+m = floor((n+Q*m)/Q); mod(n*m,2) = mod(n,2)*mod(m,2)
min(floor(n/Q),floor((n+1)/Q)) = floor(n/Q); ceil((n+m)/Q) = floor((n+m-1)/Q)+1
floor((n**2+n)/2) = (n**2+n)/2; gcd(n,m,k) = gcd(gcd(k,m),n); max(floor(n/Q),floor(m/Q)) = floor(max(n,m)/Q)
floor(n**2/4) = floor(n/2)*ceil(n/2)"""
NEAR = """abs(A) = A; abs(A-B) = A-B; abs(A-B) = B-A; root(2,A**2) = A; root(4,A**4) = A
root(4,A**2) = root(2,A); root(2,x**2-2*Q*x+Q**2) = x-Q; abs(A)+abs(B) = abs(A+B); abs(A)-abs(B) = abs(A-B)
abs(A)*abs(B) = A*B; root(2,A**2*B**2) = A*B; root(2,A)*root(2,B) = root(2,A*B); root(2,A)**2 = A
root(2,A)**2 = abs(A); root(2,x**2*y) = x*root(2,y); root(2,A**2+B**2) = abs(A)+abs(B)
abs(x-Q)+abs(x+Q) = 2*Q; abs(x-Q)-abs(x+Q) = -2*Q; abs(x)/x = 1; abs(x-Q)+abs(x+Q) = 2*abs(x)
root(2,A**6) = A**3; max(A,B) = A; max(A,B) = min(A,B); max(A,B) = (A+B+(A-B))/2; max(A,-A) = A
max(A*B,A*C) = A*max(B,C); max(A,B) = -max(-A,-B); max(A**2,B**2) = max(A,B)**2
min(abs(A),abs(B)) = abs(min(A,B)); max(x,Q) = x; max(A,B) = max(A,B-1); max(A**2,A) = A**2
ln(A**2) = 2*ln(A); exp(ln(A)) = A; ln(A)+ln(B) = ln(A*B); ln(abs(A)) = ln(A); 2**(Q*x) = Q*2**x
arcsin(sin(A)) = A; arccos(cos(A)) = A; arctan(tan(A)) = A; sin(arcsin(A)) = A; arccos(cos(x)) = abs(x)
arccos(-x) = arccos(x); arctan(1/x) = pi/2-arctan(x); arctan(x)+arctan(1/x)+A = A+pi/2
arccos(2*x**2-1) = 2*arccos(x); arcsin(2*x*root(2,1-x**2)) = 2*arcsin(x); root(2,1-cos(A)**2) = sin(A)
arctan(A) = 1/tan(A); arcsin(A) = 1/sin(A); root(2,(1-cos(2*A))/2) = sin(A); sin(A+B) = sin(A)+sin(B)
sin(abs(A)) = abs(sin(A)); arctan(A)+arctan(B) = arctan((A+B)/(1-A*B)); sin(x)**2 = sin(x**2)
arctan(2*x/(1-x**2)) = 2*arctan(x); floor(A) = ceil(A); floor(A) = floor(A+1/2); floor(-A) = -floor(A)
floor(A)+floor(B) = floor(A+B); floor(2*A) = 2*floor(A); floor(abs(A)) = abs(floor(A)); ceil(A) = floor(A)+1
floor(x/Q) = ceil(x/Q); floor(x**2) = floor(x)**2; floor(n/Q) = floor(n/(Q+1)); floor(n/Q) = n/Q; gcd(n,m) = 1
ceil(n/Q) = floor((n+Q)/Q); floor(n/Q) = floor((n-1)/Q); ceil(n/2) = floor(n/2)+1; floor((n+1)/Q) = floor(n/Q)
floor(n**2/Q) = floor((n**2+1)/Q); floor(Q*n/(Q+1)) = n-1; floor(n/Q)+floor(m/Q) = floor((n+m)/Q)
n-floor(n/(10*Q)) = n; floor(n/2) = (n-1)/2; mod(n,10*Q) = n; mod(n**2,Q) = mod(n,Q)**2; gcd(n,m) = gcd(n,m+1)
m+n-gcd(m,n) = m+n-1; gcd(n,n+Q) = 1; gcd(n**2,m**2) = gcd(n,m); gcd(2*n,m) = gcd(n,m)
floor((n+Q)/(10*R)) = floor(n/(10*R)); gcd(n,m) = gcd(n*m,m); max(n,m)-floor(n/Q) = n-floor(n/Q)
floor(n/Q) = max(floor(n/Q),0)"""
REALS = """x y z x+1 x-Q Q-x Q*x+1 x-y x+y x*y x**2-1 x**2+1 x/Q (x+1)/Q -x x-2*y Q*x x**2 x*y-1 x**3 y-Q
1-x**2 x**2-y x+y-z sin(x) cos(x) abs(x) root(2,x+Q) exp(x) x+sin(y) x*abs(y) max(x,y) tan(x) arctan(x)
ln(x)""".split()
INTEGERS = "n m n+1 2*n n-m m+n n**2 m-Q".split()
AROUND = ["E"] * 9 + """Q*E+A A-E E/Q E**2 E*A abs(E) root(2,E) max(E,A) E+A 1/E E**3 sin(E) E-R Q*E min(A,E)
ln(E) floor(E) (E+A)/Q Q-E abs(E-Q) exp(-E)""".split()
SWAP = dict(zip("max min floor ceil sin cos tan cot arcsin arccos arctan sec exp ln".split(),
                "min max ceil floor cos sin cot tan arccos arcsin arcsin tan ln exp".split()))

def num(number):
    return ("num", number)

def total(terms):
    """A flat sum with like terms put together."""
    counts = {}
    for term in (part for term in terms for part in (term[1:] if term[0] == "sum" else [term])):
        factors = term[1:] if term[0] == "times" else (term,)
        rest = tuple(sorted(factor for factor in factors if factor[0] != "num"))
        counts[rest] = counts.get(rest, 0) + math.prod(factor[1] for factor in factors if factor[0] == "num")
    flat = [product([num(count), *rest]) for rest, count in counts.items() if count]
    return ("sum", *flat) if len(flat) > 1 else flat[0] if flat else num(0)

def product(factors):
    """A flat product with one number in front."""
    flat = [part for factor in factors for part in (factor[1:] if factor[0] == "times" else [factor])]
    number = math.prod(factor[1] for factor in flat if factor[0] == "num")
    flat = Counter(factor for factor in flat if factor[0] != "num")
    flat = [factor if often == 1 else ("power", factor, num(often)) for factor, often in flat.items()]
    if not number:
        return num(0)
    if number == -1 and len(flat) == 1 and flat[0][0] == "sum":
        return total([product([num(-1), term]) for term in flat[0][1:]])
    flat = [num(number)] * (number != 1 or not flat) + flat
    return ("times", *flat) if len(flat) > 1 else flat[0]

def tree(node):
    """Python syntax as tuples, (kind, *parts)."""
    if isinstance(node, ast.Constant):
        return num(node.value)
    if isinstance(node, ast.Name):
        return ("pi",) if node.id == "pi" else ("letter", node.id)
    if isinstance(node, ast.UnaryOp):
        return product([num(-1), tree(node.operand)])
    if isinstance(node, ast.Call):
        return (node.func.id, *map(tree, node.args))
    left, right = tree(node.left), tree(node.right)
    kind = type(node.op).__name__
    if kind in ("Add", "Sub"):
        return total([left, right if kind == "Add" else product([num(-1), right])])
    if kind == "Mult":
        return product([left, right])
    if kind == "Pow" and left[0] == right[0] == "num":
        return num(left[1] ** right[1])
    return left if left == num(0) else ("power" if kind == "Pow" else "over", left, right)

def parts(node):
    return [node] + [part for child in node[1:] if isinstance(child, tuple) for part in parts(child)]

def changed(node, coin):
    """One small change at the top of the formula, or None."""
    kind, args = node[0], node[1:]
    choices = []
    if kind == "num":
        choices = [num(args[0] + coin.choice((-1, 1)))]
    elif kind == "sum":
        at = coin.randrange(len(args))
        choices = [total([product([num(number if i == at else 1), arg]) for i, arg in enumerate(args)])
                   for number in (-1, 0, 2)]
    elif kind == "times":
        choices = [product([num(number), *args]) for number in (-1, 2)]
    elif kind in ("abs", "letter"):
        bare = args[0] if kind == "abs" else ("abs", node)
        choices = [bare, product([num(-1), node]), total([node, num(1)])]
    elif kind == "root":
        choices = [("root", num(args[0][1] + 2), args[1]), ("abs", args[1]), *args[1][1:2] * 3]
    elif kind == "power":
        choices = [("power", args[0], total([args[1], num(1)])), args[0]]
    elif kind == "over":
        choices = [("over", args[1], args[0]), ("over", args[0], total([args[1], num(1)]))]
    elif kind in SWAP:
        choices = [(SWAP[kind], *args)] + [args[0], args[-1]] * (kind in ("max", "min"))
        if kind in ("floor", "ceil"):
            half = ("over", num(1), num(2))
            one = num(coin.choice((-1, 1)))
            choices += [args[0], ("floor", total([args[0], half])), total([choices[0], one])]
    choices = [choice for choice in choices if isinstance(choice, tuple)]
    return coin.choice(choices) if choices else None

def mutant(node, coin):
    """The formula with one small change anywhere, or None."""
    if coin.random() < 1 / len(parts(node)):
        return changed(node, coin)
    at = coin.choice([i for i, child in enumerate(node) if isinstance(child, tuple)] or [0])
    new = mutant(node[at], coin) if at and (node[0], at) not in (("root", 1), ("mod", 2)) else None
    rest = [*node[1:at], new, *node[at + 1:]]
    again = {"sum": total, "times": product}.get(node[0], lambda children: (node[0], *children))
    return None if new is None else again(rest)

def hole(numbers):
    return np.where(numbers == 0, np.nan, numbers)

def root(index, numbers):
    roots = np.sign(numbers) * np.abs(numbers) ** (1 / index)
    return np.where((numbers < 0) & (index % 2 == 0), np.nan, roots)

def too_large(*_):
    raise OverflowError

# kind: (by numpy, on arrays; by mpmath, with 60 digits)
NAN = mpmath.nan
VALUES = {
    "sum": (lambda *a: sum(a), lambda *a: mpmath.fsum(a)), "abs": (np.abs, abs),
    "times": (lambda *a: functools.reduce(np.multiply, a), lambda *a: mpmath.fprod(a)),
    "over": (lambda a, b: a / hole(b), lambda a, b: a / b if b else NAN),
    "power": (lambda a, b: np.where((a == 0) & (b <= 0), np.nan, np.power(a, b)),
              lambda a, b: (too_large if abs(b) > 1e5 else operator.pow)(a, int(b) if b == int(b) else b)
              if a or b > 0 else NAN),
    "root": (root, lambda i, a: mpmath.sign(a) * mpmath.root(abs(a), int(i)) if a >= 0 or i % 2 else NAN),
    "max": (lambda *a: functools.reduce(np.maximum, a), max), "mod": (np.mod, lambda a, b: a % b),
    "min": (lambda *a: functools.reduce(np.minimum, a), min), "floor": (np.floor, mpmath.floor),
    "gcd": (lambda *a: np.gcd.reduce([b.astype(int) for b in np.broadcast_arrays(*a)]).astype(float),
            lambda *a: math.gcd(*map(int, a))), "ceil": (np.ceil, mpmath.ceil),
    "exp": (np.exp, lambda a: (too_large if abs(a) > 1e6 else mpmath.exp)(a)),
    "ln": (lambda a: np.log(np.where(a > 0, a, np.nan)), lambda a: mpmath.log(a) if a > 0 else NAN),
    "sin": (np.sin, mpmath.sin), "cos": (np.cos, mpmath.cos), "tan": (np.tan, mpmath.tan),
    "sec": (lambda a: 1 / np.cos(a), mpmath.sec), "cot": (lambda a: 1 / hole(np.tan(a)),
                                                          lambda a: mpmath.cot(a) if a else NAN),
    "arcsin": (np.arcsin, lambda a: mpmath.asin(a) if abs(a) <= 1 else NAN),
    "arctan": (np.arctan, mpmath.atan),
    "arccos": (np.arccos, lambda a: mpmath.acos(a) if abs(a) <= 1 else NAN)}

def value(node, point, exact):
    """The value at `point` ({letter: array, or one number if `exact`}); NaN: not real."""
    kind = node[0]
    if kind in ("num", "letter", "pi"):
        return {"num": mpmath.mpf if exact else np.float64, "letter": point.get,
                "pi": lambda: +mpmath.pi if exact else np.pi}[kind](*node[1:])
    args = [value(arg, point, exact) for arg in node[1:]]
    if exact:
        result = NAN if any(map(mpmath.isnan, args)) else VALUES[kind][1](*args)
        result = mpmath.mpf(result) if isinstance(result, (int, mpmath.mpf)) else NAN
        if abs(result) > 1e25:
            raise OverflowError  # too few digits are left for what follows
        near = 0 if kind == "sum" and abs(result) < mpmath.mpf("1e-40") * max(map(abs, args)) else result
        whole = mpmath.nint(near) if mpmath.isfinite(near) else near
        return whole if whole and abs(near - whole) < 1e-40 else near
    with np.errstate(all="ignore"):
        result = VALUES[kind][0](*args)
        if kind == "sum":
            largest = functools.reduce(np.maximum, map(np.abs, args))
            result = np.where(np.abs(result) < 1e-14 * largest, 0, result)
        whole = np.round(result)
        return np.where((whole != 0) & (np.abs(result - whole) < 1e-10), whole, result)

def points(letters, whole, draw):
    """{letter: thousands of numbers}: both signs, small and large, and a grid; whole numbers if `whole`."""
    if whole:
        grid, line = np.arange(-12.0, 13), np.arange(-400.0, 401)
        pools = [draw.integers(-size, size + 1, 700).astype(float) for size in (12, 40, 130, 400, 10000)]
    else:
        grid = np.array([-3, -2, -1.5, -1, -.5, -.25, 0, .25, .5, 1, 1.5, 2, 3])
        line = np.arange(-160, 161) / 8
        pools = [draw.uniform(-size, size, 700) for size in (1, 3, 8, 25)]
        pools.append(10 ** draw.uniform(-3, 3.5, 700) * draw.choice([-1, 1], 700))
    cross = np.array(list(itertools.product(grid, repeat=len(letters)))).T
    cross = cross[:, draw.permutation(cross.shape[1])[:1000]]
    lines = [np.concatenate([line, *pools]) for _ in letters]
    near = [np.concatenate(pools[:2]) for _ in letters]
    return {letter: np.concatenate([cross[i], draw.permutation(lines[i]), draw.permutation(near[i])])
            for i, letter in enumerate(letters)}

def differ(one, two, point):
    """At one point, with 60 digits: "value", "domain" (only one is real), or None."""
    with mpmath.workdps(60):
        try:
            point = {name: mpmath.mpf(float(number)) for name, number in point.items()}
            left, right = value(one, point, True), value(two, point, True)
        except OverflowError:
            return None
        if mpmath.isnan(left) or mpmath.isnan(right):
            return "domain" if mpmath.isnan(left) != mpmath.isnan(right) else None
        return "value" if abs(left - right) > mpmath.mpf("1e-30") * max(1, abs(left)) else None

def same(one, two, cloud, whole, draw):
    """True: equal wherever real, on one domain; False: not; None: holes at single points, or too few."""
    size = len(next(iter(cloud.values())))
    left, right = [np.broadcast_to(value(side, cloud, False), size) for side in (one, two)]
    with np.errstate(all="ignore"):
        known = ~(np.abs(left) > 1e100) & ~(np.abs(right) > 1e100)
        real = known & ~np.isnan(left) & ~np.isnan(right)
        error = np.where(real, np.abs(left - right) / np.maximum(1e-9, np.abs(left) + np.abs(right)), 0)
    holes = draw.permutation(np.flatnonzero(known & (np.isnan(left) != np.isnan(right))))
    if real.sum() < 100 and len(holes) < 100:
        return None
    suspects = [*np.argsort(-error)[:10], *draw.permutation(np.flatnonzero(error > 1e-8))[:20]]
    places = [{name: column[at] for name, column in cloud.items()} for at in [*suspects, *holes[:30]]]
    if any(differ(one, two, place) == "value" for place in places[:len(suspects)]):
        return False
    gaps = [place for place in places[len(suspects):] if differ(one, two, place) == "domain"]
    for place in gaps:
        around = [{name: number * (1 + draw.uniform(-1, 1) / 1000) + draw.uniform(-1, 1) / 10 ** 6
                   for name, number in place.items()} for _ in range(6)]
        if len(holes) > size / 10 if whole else all(differ(one, two, other) == "domain" for other in around):
            return False
    return None if gaps else True

def steps(node):
    return node[0] in ("floor", "ceil", "mod", "gcd")

def truth(one, two, draw):
    """same() on many points; None too where it depends on what n, m, k stand for."""
    nodes = parts(one) + parts(two)
    letters = sorted({node[1] for node in nodes if node[0] == "letter"})
    if not letters or ("letter" not in [node[0] for node in parts(one)]):
        return None  # whether a formula may stand for a number is another question
    whole = set(letters) <= set("nmk")
    clouds = [points(letters, whole, draw)] if whole else []
    clouds += [{name: np.abs(column) + 1 for name, column in cloud.items()} for cloud in clouds]
    clouds += [] if whole and any(map(steps, nodes)) else [points(letters, False, draw)]
    verdicts = {same(one, two, cloud, whole, draw) for cloud in clouds}
    return verdicts.pop() if len(verdicts) == 1 else None

def braces(text, coin):
    return rf"\left({text}\right)" if "frac" in text and coin.random() < .5 else f"({text})"

def power(base, exponent, coin):
    text, above = tex(base, coin), tex(exponent, coin)
    above = f"^{above}" if len(above) == 1 and coin.random() < .5 else f"^{{{above}}}"
    if base[0] in ("sin", "cos", "tan") and exponent[0] == "num" and coin.random() < .7:
        return text[:4] + above + text[4:]
    plain = base[0] in ("letter", "abs", "floor", "ceil") or base[0] == "num" and base[1] >= 0
    return (text if plain else braces(text, coin)) + above

def times(factors, coin):
    rank = {"num": 0, "exp": 1, "pi": 1, "letter": 2, "power": 3, "over": 3, "root": 3, "abs": 4, "sum": 5}
    factors = sorted(coin.sample(factors, len(factors)), key=lambda factor: rank.get(factor[0], 6))
    text = ""
    for factor in factors:
        new = braces(tex(factor, coin), coin) if factor[0] == "sum" else tex(factor, coin)
        new = re.sub(r"^(\w)/(\d+)$", r"\\frac{\1}{\2}", new)  # a/3(b+1) could be read in two ways
        if factor is not factors[-1]:
            new = re.sub(r"^(\\[a-z]+(?:\^\{-1\})?) (\w)$", r"\1(\2)", new)  # \sin(x)y, not \sin xy
        if factor == num(-1):
            new = "-"
        elif text not in ("", "-") and re.match(r"[-\d]|\\d?frac\{-?\d", new):
            new = r" \cdot " + (braces(new, coin) if new[0] == "-" else new)
        elif text[-1:].isalpha() and "\\" in text and new[0].isalpha():
            new = " " + new
        text += new
    return r" \cdot ".join(text) if re.fullmatch("[a-z]+", text) else text  # "ab" alone may be a word

def tex(node, coin):
    """The formula as LaTeX, in one of its spellings."""
    kind, args = node[0], node[1:]
    if kind in ("num", "letter", "pi"):
        return r"\pi" if kind == "pi" else str(args[0])
    if kind in ("times", "power"):
        return times(args, coin) if kind == "times" else power(*args, coin)
    inner = [tex(arg, coin) for arg in args]
    if kind == "sum":
        coin.shuffle(inner)
        inner.sort(key=lambda text: text[0] == "-" and coin.random() < .6)
        return "+".join(inner).replace("+-", "-")
    if kind == "over":
        slash = len(inner[0]) == 1 and inner[1].isdigit() and coin.random() < .2
        return "/".join(inner) if slash else rf"\{coin.choice(('', 'd'))}frac{{{inner[0]}}}{{{inner[1]}}}"
    if kind == "abs":
        nested = "|" in inner[0] or "vert" in inner[0]
        return coin.choice(["|%s|"] * (not nested) + [r"\left|%s\right|", r"\lvert %s\rvert "]) % inner[0]
    if kind == "root":
        return (r"\sqrt" if inner[0] == "2" else rf"\sqrt[{inner[0]}]") + f"{{{inner[1]}}}"
    if kind in ("floor", "ceil"):
        return coin.choice((r"\l%s %s \r%s", r"\left\l%s %s \right\r%s")) % (kind, inner[0], kind)
    if kind in ("max", "min", "gcd"):
        form = r"\%s\{%s\}" if kind != "gcd" and coin.random() < .2 else r"\%s(%s)"
        return form % (kind, coin.choice((",", ", ")).join(inner))
    if kind == "mod":
        return rf"({inner[0] if args[0][0] == 'letter' else f'({inner[0]})'} \bmod {inner[1]})"
    if kind == "exp":
        return coin.choice(("e^{%s}", "e^{%s}", r"\exp(%s)")) % inner[0]
    name = kind[3:] + "^{-1}" if kind.startswith("arc") and coin.random() < .3 else kind
    bare = len(inner[0]) == 1 and coin.random() < .5
    return rf"\{name} {inner[0]}" if bare else rf"\{name}" + braces(inner[0], coin)

def filled(pair, coin):
    """The two formulas of a row of EQUAL or NEAR: letters renamed, numbers and formulas put in."""
    whole = re.search(r"\b[nmk]\b", "=".join(pair))
    real = coin.sample(coin.choice(("xyz", "xyzabtuw")), 3)
    few = 3 if re.search(r"\b[yz]\b", "=".join(pair)) else coin.choice((1, 2, 2, 3))
    new = dict(zip("nmk", coin.sample("nmk", 3))) | {name: real[i % few] for i, name in enumerate("xyz")}
    new |= dict(zip("ABC", coin.sample(INTEGERS if whole else REALS[:coin.choice((24, 24, 24, 99))], 3)))
    new |= {name: str(coin.choice((2, 2, 3, 3, 4, 5, 6, 7, 9, 12))) for name in "QR"}
    around = coin.choice(AROUND)
    sides = []
    for side in pair:
        side = re.sub("[ABC]", lambda mark: f"({new[mark[0]]})", around.replace("E", f"({side})"))
        side = re.sub(r"[QR]|\b[xyznmk]\b", lambda mark: new[mark[0]], side)
        sides.append(tree(ast.parse(side, mode="eval").body))
    return sides

def pairs(count, seed):
    """`count` times (gold, answer, equal?), of letters and in LaTeX; about half of them equal."""
    coin, draw = random.Random(seed), np.random.default_rng(seed)
    equal, near = [[row.split(" = ") for row in re.split("; |\n", text)] for text in (EQUAL, NEAR)]
    found = []
    while len(found) < count:
        source = coin.choice(("equal", "equal", "near", "mutant"))
        one, two = filled(coin.choice(near if source == "near" else equal), coin)
        two = mutant(coin.choice((one, two)), coin) if source == "mutant" else two
        if two is None or one == two:
            continue
        one, two = coin.sample((one, two), 2)
        verdict = truth(one, two, draw)
        if verdict and any(map(steps, parts(two))):
            one, two = two, one  # the gold shows that n, m, k are integers
        texts = [tex(side, coin) for side in (one, two)]
        if verdict is not None and max(map(len, texts)) <= 150 and texts[0] != texts[1]:
            found.append((*texts, verdict))
    return found

def misjudged(made):
    """The pairs that the grader gets wrong, by kind: (false yes, false no)."""
    wrong = [row for row in made if rewards.is_equal(row[1], row[0], fast=False) != row[2]]
    return [[row[:2] for row in wrong if row[2] == equal] for equal in (False, True)]

if __name__ == "__main__":
    started = time.time()
    made = pairs(int(sys.argv[1]), int((sys.argv[2:] or ["0"])[0]))
    print(f"{len(made)} pairs, {sum(row[2] for row in made)} equal, made in {time.time() - started:.0f} s")
    wrong = misjudged(made)
    for kind, rows in zip(("false yes", "false no"), wrong):
        print(*(f"{kind}: {gold}   ||   {answer}" for gold, answer in rows), sep="\n")
    print(f"{len(wrong[0])} false yes, {len(wrong[1])} false no; {time.time() - started:.0f} s")
