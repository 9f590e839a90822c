"""The text after the colon of --config."""

from __future__ import annotations

import pytest
import tiny

from xmc_jax.config_args import find_file, parse

DEFAULTS = dict(data="wordnet-mini", loss="", epochs=45, rate=1e-3, debug=False, hub=None)


def test_nothing_given() -> None:
    for arg in (None, "", " , "):
        assert parse(arg, **DEFAULTS).to_dict() == DEFAULTS


def test_first_may_be_unnamed() -> None:
    args = parse("wordnettitles,loss=supcon,debug", **DEFAULTS)
    assert args.to_dict() == DEFAULTS | {"data": "wordnettitles", "loss": "supcon", "debug": True}
    assert parse("debug", **DEFAULTS).data == "wordnet-mini"
    assert parse("./my-data/a.b", **DEFAULTS).data == "./my-data/a.b"


def test_values_take_the_type_of_the_default() -> None:
    args = parse("epochs=3, rate=2, hub=some/name=x, debug=no, data=x", **DEFAULTS)
    assert args.to_dict() == dict(
        data="x", loss="", epochs=3, rate=2.0, debug=False, hub="some/name=x"
    )
    assert isinstance(args.rate, float)


@pytest.mark.parametrize(
    "text,value", [("true", True), ("1", True), ("False", False), ("0", False)]
)
def test_bools(text: str, value: bool) -> None:
    assert parse(f"debug={text}", **DEFAULTS).debug is value


@pytest.mark.parametrize(
    ("arg", "message"),
    [
        ("x,los=psl", r"unknown option 'los'.*data=wordnet-mini.*Did you mean 'loss'"),
        ("x,debgu", r"unknown option 'debgu'.*Did you mean 'debug'"),
        ("x,loss", r"'loss' in 'x,loss' has no value"),
        ("x,data=y", r"'data' is given twice"),
        ("debug,debug=no", r"'debug' is given twice"),
        ("epochs=many", r"'epochs': found 'many', expected int"),
        ("debug=maybe", r"'debug': found 'maybe', expected bool"),
    ],
)
def test_errors(arg: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(arg, **DEFAULTS)


def test_defaults_must_be_scalars() -> None:
    with pytest.raises(TypeError, match="ks"):
        parse("", ks=(1, 3, 5))


def test_a_configuration_is_found_by_its_name_and_a_file_is_left_as_it_is(tmp_path) -> None:
    assert find_file("unidec") == str(tiny.ROOT / "configs" / "unidec.py")
    assert find_file("configs/unidec.py") == "configs/unidec.py"
    assert find_file("no/such/file.py") == "no/such/file.py"  # whoever opens it says so
    own = tmp_path / "own"
    own.write_text("")
    assert find_file(str(own)) == str(own)


@pytest.mark.parametrize(
    ("name", "hint"), [("nonsense", r"\.$"), ("unidek", r"\. Did you mean 'unidec'")]
)
def test_a_name_that_is_none_lists_those_that_are(name: str, hint: str) -> None:
    known = r"expected a file \(\.py\) or one of depsl, frugal, unidec"
    with pytest.raises(ValueError, match=f"no configuration '{name}': {known}{hint}"):
        find_file(name)


def test_a_path_that_is_there_may_hold_commas_and_more(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a=b").mkdir()
    for name in ("a=b/p,q.tsv", "x.tsv ", "y,debug", "loss=psl.tsv", " z"):
        (tmp_path / name).touch()
    for name in ("a=b/p,q.tsv", "x.tsv ", "y,debug", " z", f"{tmp_path}/a=b/p,q.tsv"):
        assert parse(name, **DEFAULTS).to_dict() == DEFAULTS | {"data": name}
        args = parse(f"{name},epochs=3,debug,hub=a=b/p,q.tsv", **DEFAULTS)
        given = {"data": name, "epochs": 3, "debug": True, "hub": "a=b/p,q.tsv"}
        assert args.to_dict() == DEFAULTS | given
        assert parse(f"debug,data={name}", **DEFAULTS).data == name
    assert parse("loss=psl.tsv", **DEFAULTS).loss == "psl.tsv"
    assert parse("a=b/p,q.tsv , debug", **DEFAULTS).data == "a=b/p,q.tsv"
    with pytest.raises(ValueError, match=r"unknown option 'a' in 'a=c,debug'"):
        parse("a=c,debug", **DEFAULTS)
