"""No `Any` for what families are made of; mypy, which CI runs, does the rest."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest
import tiny

NAMES = ("model", "system", "embedder", "encoder", "run", "ranker")


def untyped(source: str) -> list[str]:
    """Arguments, attributes and results so named that are annotated `Any`, or not at all."""
    tree = ast.parse(source)
    wrong = []
    for name, annotation, line in _annotated(tree):
        plain = name.strip("_")
        named = plain in NAMES or plain.endswith(tuple(f"_{kind}" for kind in NAMES))
        if named and (annotation is None or _is_any(annotation)):
            wrong.append(f"{line}: {name}")
    return wrong


def _annotated(tree: ast.AST) -> Iterator[tuple[str, ast.expr | None, int]]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            given = node.args
            for arg in (*given.posonlyargs, *given.args, *given.kwonlyargs):
                yield arg.arg, arg.annotation, arg.lineno
            yield node.name, node.returns, node.lineno
        elif isinstance(node, ast.AnnAssign):
            target = node.target
            name = target.attr if isinstance(target, ast.Attribute) else ast.unparse(target)
            yield name, node.annotation, node.lineno


def _is_any(annotation: ast.expr) -> bool:
    """`Any` itself, or as a side of ``|`` or in `Optional` and `Union`."""
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        annotation = ast.parse(annotation.value, mode="eval").body
    if isinstance(annotation, ast.BinOp):
        return _is_any(annotation.left) or _is_any(annotation.right)
    if isinstance(annotation, ast.Subscript):
        inner = annotation.slice
        parts = inner.elts if isinstance(inner, ast.Tuple) else [inner]
        union = ast.unparse(annotation.value).rpartition(".")[2] in ("Optional", "Union")
        return union and any(map(_is_any, parts))
    return ast.unparse(annotation) in ("Any", "typing.Any", "object")


def test_what_families_are_made_of_has_types():
    files = sorted((tiny.ROOT / "xmc_jax").rglob("*.py"))
    assert len(files) > 100
    wrong = [
        f"{path.relative_to(tiny.ROOT)}:{place}"
        for path in files
        for place in untyped(path.read_text(encoding="utf-8"))
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("def f(model): ...", ["1: model"]),
        ("def f(*, text_encoder: Any = None): ...", ["1: text_encoder"]),
        ("def f(run: Any | None): ...", ["1: run"]),
        ("def f(run: 'Any'): ...", ["1: run"]),
        ("def f(run: typing.Optional[Any]): ...", ["1: run"]),
        ("class A:\n    ranker: Any", ["2: ranker"]),
        ("class A:\n    def f(self):\n        self._system: Any = 1", ["3: _system"]),
        ("def encoder(options: X) -> Any: ...", ["1: encoder"]),
        ("def load_encoder(path): ...", ["1: load_encoder"]),
        ("def f(model: UniDEC, runs, tokens: Any) -> Any: ...", []),
        ("class A:\n    system: System\n    def run(self, x) -> None: ...", []),
        ("def encoder() -> tuple[Encoder, Any]: ...", []),
    ],
)
def test_the_checker_sees_what_it_should(source, found):
    assert untyped(source) == found
