"""Faults that a person could make: found in a module's syntax tree, planted in its text. Pure."""

from __future__ import annotations

import ast
import itertools
import random
from collections import defaultdict
from dataclasses import dataclass

_FLIPPED = {
    **{ast.Lt: ">=", ast.LtE: ">", ast.Gt: "<=", ast.GtE: "<", ast.Eq: "!=", ast.NotEq: "=="},
    **{ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in"},
}
_BOUNDARY = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">"}
_SILENT = {"log", "_log", "failpoint"}  # calls without an effect that a test should see


@dataclass(frozen=True, slots=True)
class Fault:
    """One change: the bytes from `start` to `end` of a module become `text`."""

    path: str  # of the module, from the root
    operator: str
    line: int
    end_line: int
    start: int
    end: int
    text: str

    def planted(self, source):
        data = source.encode()
        return (data[: self.start] + self.text.encode() + data[self.end :]).decode()


def find_faults(path, source):
    """All faults that can be made in the functions of a module. What runs at its import is left alone."""
    data = source.encode()
    begins = [0, *itertools.accumulate(len(line) for line in data.splitlines(keepends=True))]

    def span(first, last):
        return begins[first.lineno - 1] + first.col_offset, begins[last.end_lineno - 1] + last.end_col_offset

    def text(node):
        return data[slice(*span(node, node))].decode()

    for node in _nodes(ast.parse(source)):
        for operator, new, first, last in _changes(node, text):
            yield Fault(path, operator, first.lineno, last.end_lineno, *span(first, last), new)


def sample(modules, count, seed):
    """Draws from all modules (path → source) alike, and within a module from all operators alike."""
    chance = random.Random(seed)
    placed = []
    for path in sorted(modules):
        faults = sorted(find_faults(path, modules[path]), key=lambda _: chance.random())
        ranks = defaultdict(itertools.count)  # within its operator; one of each operator comes first
        ranked = sorted([(next(ranks[one.operator]), chance.random(), one) for one in faults], key=lambda it: it[:2])
        placed += [(place, chance.random(), one) for place, (_, _, one) in enumerate(ranked)]
    return [one for _, _, one in sorted(placed, key=lambda it: it[:2])[:count]]


def _nodes(node, inside=False):
    """What runs in functions, without what is only said: log lines, annotations, text, the message of an error."""
    if isinstance(node, ast.Expr) and ast.unparse(node).replace("(", ".").partition(".")[0] in _SILENT:
        return
    if inside:
        yield node
    # Before Python 3.12 what is inside an f-string has no position of its own.
    if not isinstance(node, (ast.JoinedStr, ast.Raise, ast.arguments)):
        defines = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        annotated = isinstance(node, ast.AnnAssign)
        for child in node.body if defines else [node.value] if annotated else ast.iter_child_nodes(node):
            if child is not None:
                yield from _nodes(child, inside or defines)


def _changes(node, text):
    """(operator, new text, first and last node that it takes the place of)"""
    match node:
        # Without the assignment of a name, whatever reads it fails: that says little.
        case ast.Raise() | ast.Expr(ast.Call()) | ast.AugAssign() | ast.Delete():
            yield "dropped statement", "pass", node, node
        case ast.Assign([ast.Attribute() | ast.Subscript()]):
            yield "dropped statement", "pass", node, node
        case ast.If(test, [*_, ast.Return() | ast.Raise() | ast.Continue() | ast.Break()], []):
            yield "dropped guard", "False", test, test
        case ast.UnaryOp(ast.Not(), operand):
            yield "negation", f"({text(operand)})", node, node
        case ast.Compare(left, [op], [right]):
            for name, table in (("flipped comparison", _FLIPPED), ("boundary", _BOUNDARY)):
                if type(op) in table:
                    yield name, f"(({text(left)}) {table[type(op)]} ({text(right)}))", node, node
        case ast.BoolOp(op, values):
            other = " or " if isinstance(op, ast.And) else " and "
            yield "and/or", f"({other.join(f'({text(one)})' for one in values)})", node, node
        case ast.Call(ast.Name("min" | "max" as name)):
            yield "min/max", "max" if name == "min" else "min", node.func, node.func
        case ast.Call(_, args) if not any(isinstance(one, ast.Starred) for one in args):
            for left, right in itertools.pairwise(args):
                yield "swapped arguments", f"{text(right)}, {text(left)}", left, right
    for test in [node.test] if hasattr(node, "test") else getattr(node, "ifs", ()):
        # A comparison is flipped, and a `not` is dropped, by the above.
        if not isinstance(test, (ast.Compare, ast.UnaryOp, ast.Constant)):
            yield "negation", f"(not ({text(test)}))", test, test
