"""``python -m tests.house [FOLDER ...]``: where the product breaks a rule of CONTRIBUTING.md that a program can judge.

``tests/unit/test_house.py`` says how often each rule may be broken in each area.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from tests.size import GENERATED, MOST_MODULES, PRODUCT, PROJECT, crowded

MOST_LINES, FEWEST_LINES, LONGEST_FUNCTION, MOST_PARAMETERS = 400, 60, 50, 7
LOOPS, RESULTS = {"each", "one"}, {"found", "known", "one", "entry", "left", "wanted", "everything", "here", "own"}

CLASS, LONG, SHORT, FUNCTION, CONSTRUCTOR, FOLDER, DODGE, VAGUE = RULES = (
    "a class name stands for one thing: rename one of them, or merge them",
    f"a module has at most {MOST_LINES} lines: cut it where its things part",
    f"a module that only one other uses has at least {FEWEST_LINES} lines: move it there",
    f"a function has at most {LONGEST_FUNCTION} lines: name its parts",
    f"a constructor has at most {MOST_PARAMETERS} parameters: hand over a value or a Protocol",
    f"a folder has at most {MOST_MODULES} modules: make a folder of those that belong together",
    "cast() and vars(x)[...] = hide what a thing is: give it the type that it has",
    "a name says what the thing is: claim, gpu, request, offer, reason",
)


@dataclass(frozen=True)
class Finding:
    """A place in the product that breaks a rule."""

    rule: str
    file: str
    line: int
    what: str

    @property
    def area(self) -> str:
        return self.file.partition("/")[0]

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.what}"


@cache
def findings() -> tuple[Finding, ...]:
    """All that breaks a rule, in the order of the rules and files."""
    files = [file for area in PRODUCT for file in (PROJECT / area).rglob("*.py") if GENERATED not in file.parts]
    texts = {str(file.relative_to(PROJECT)): file.read_text() for file in files}
    trees = {file: ast.parse(text) for file, text in texts.items()}
    broken = [*_classes(trees), *_folders()]
    users = _users(trees)
    for file, tree in trees.items():
        broken += _module(file, texts[file].count("\n"), users[file.removesuffix(".py").replace("/", ".")])
        for node in ast.walk(tree):
            broken += [*_function(file, node), *_dodge(file, node), *_vague_names(file, node)]
    return tuple(sorted(broken, key=lambda finding: (RULES.index(finding.rule), finding.file, finding.line)))


def _classes(trees: dict[str, ast.Module]) -> Iterator[Finding]:
    defined = defaultdict[str, list[tuple[str, int]]](list)
    for file, tree in trees.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                defined[node.name].append((file, node.lineno))
    for name, places in defined.items():
        for file, line in places if len(places) > 1 else ():
            others = ", ".join(other for other, _ in places if other != file)
            yield Finding(CLASS, file, line, f"class {name}, which is also in {others}")


def _folders() -> Iterator[Finding]:
    for folder, modules in crowded().items():
        yield Finding(FOLDER, f"{folder}/", 1, f"{modules} modules")


def _users(trees: dict[str, ast.Module]) -> Counter[str]:
    """How many modules import each module."""
    users = Counter[str]()
    for tree in trees.values():
        imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        names = {f"{node.module}.{name.name}" for node in imports for name in node.names}
        users.update(names | {str(node.module) for node in imports})
    return users


def _module(file: str, lines: int, users: int) -> Iterator[Finding]:
    if lines > MOST_LINES:
        yield Finding(LONG, file, 1, f"{lines} lines")
    if lines < FEWEST_LINES and users == 1:
        yield Finding(SHORT, file, 1, f"{lines} lines")


def _function(file: str, node: ast.AST) -> Iterator[Finding]:
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return
    lines = (node.end_lineno or node.lineno) - node.lineno + 1
    if lines > LONGEST_FUNCTION:
        yield Finding(FUNCTION, file, node.lineno, f"{node.name} has {lines} lines")
    parameters = len(node.args.posonlyargs) + len(node.args.args) + len(node.args.kwonlyargs) - 1
    if node.name == "__init__" and parameters > MOST_PARAMETERS:
        yield Finding(CONSTRUCTOR, file, node.lineno, f"{parameters} parameters")


def _dodge(file: str, node: ast.AST) -> Iterator[Finding]:
    targets = node.targets if isinstance(node, ast.Assign) else ()
    calls = [target.value for target in targets if isinstance(target, ast.Subscript)]
    for call, name in [(node, "cast"), *((call, "vars") for call in calls)]:
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == name:
            yield Finding(DODGE, file, call.lineno, f"{name}()")


def _vague_names(file: str, node: ast.AST) -> Iterator[Finding]:
    targets: list[ast.expr] = []
    if isinstance(node, ast.For | ast.comprehension):
        targets, vague = [node.target], LOOPS
    elif isinstance(node, ast.Assign):
        targets, vague = node.targets, RESULTS
    for name in (name for target in targets for name in ast.walk(target)):
        if isinstance(name, ast.Name) and name.id in vague:
            yield Finding(VAGUE, file, name.lineno, name.id)


if __name__ == "__main__":
    for finding in findings():
        if finding.file.startswith(tuple(sys.argv[1:]) or ""):
            print(f"{finding}: {finding.rule}")
