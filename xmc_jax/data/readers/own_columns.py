"""Which column of a table, or key of JSON Lines, holds the texts and which the labels."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path

from xmc_jax.data.readers.raw_files import DataError, problem
from xmc_jax.data.readers.reading import Reading

TEXT_NAMES = frozenset(
    "text texts title titles query queries question questions sentence sentences document "
    "documents description content name product headline headlines body comment comments "
    "comment_text review reviews review_text message tweet post abstract summary utterance input "
    "prompt passage paragraph article caption transcript product_title product_name news_title "
    "texto textos título titulo texte titre titel überschrift beschreibung pregunta frage "
    "текст тексты заголовок название вопрос описание "
    "标题 題目 题目 標題 文本 内容 正文 问题 句子 描述 新闻标题 タイトル 本文 テキスト "
    "見出し 제목 본문 텍스트 내용".split()
)
LABEL_NAMES = frozenset(
    "label labels label_id label_ids labelid labelids label_texts label_name "
    "label_names category categories category_id category_ids category_name class classes tag "
    "tags target targets topic topics genre genres intent intents sentiment emotion department "
    "etiqueta etiquetas categoría categorías categoria categorias tema temas étiquette étiquettes "
    "catégorie catégories kategorie kategorien schlagwort schlagworte schlagwörter thema themen "
    "метка метки категория категории тег теги тема темы рубрика рубрики "
    "主题 標籤 标签 类别 類別 分类 分類 类目 话题 ラベル カテゴリ カテゴリー "
    "タグ 라벨 레이블 카테고리 태그 분류 주제".split()
)
_EITHER = frozenset("keyword keywords subject subjects".split())  # whichever the other lacks
# Before all others of their kind; texts are titles where there are longer ones too.
_FIRST_TEXTS, _FIRST_LABELS = ("text", "title", "headline", "标题"), ("labels", "label")
ADVICE = "Write one text and its labels a line: text<TAB>label|label; in CSV text,label|label."


@dataclasses.dataclass(frozen=True)
class Columns:
    """Places of the columns.

    Attributes:
      text: of the texts, from 0.
      labels: of the labels; None where there are texts only.
      width: columns in all.
      header: whether the first row holds their names.
    """

    text: int
    labels: int | None
    width: int
    header: bool


def normal(name: str) -> str:
    """A column's name as it is compared: ``Comment Text`` is ``comment_text``."""
    return re.sub(r"[\s_-]+", "_", name.strip().casefold())


def find_columns(path: Path, line: int, fields: Sequence[str], reading: Reading) -> Columns:
    """Columns of a table, from its first row and from flags.

    Raises:
      DataError: no such column, or more than two of which none or several could be meant.
    """
    table = _Row(path, line, fields)
    text, text_named = table.given("text", reading.text_column)
    labels, labels_named = table.given("label", reading.label_column)
    texts, tags = table.known(TEXT_NAMES, _FIRST_TEXTS), table.known(LABEL_NAMES, _FIRST_LABELS)
    either = table.known(_EITHER)
    texts, tags = texts or (either if tags else []), tags or (either if texts else [])
    if text is not None and labels is not None:
        header = text_named or labels_named or (text in texts and labels in tags)
    else:
        texts = texts if text is None else [text]
        tags = tags if labels is None else [labels]
        header = text_named or labels_named or bool(texts and tags)
        if not (texts and tags):
            rest = [i for i in range(len(fields)) if i not in (text, labels)]
            if len(fields) != 2:
                raise table.unclear()
            texts, tags = texts or rest[:1], tags or rest[-1:]
        text, labels = table.one("text", texts), table.one("label", tags)
    if text == labels:
        raise table.unclear()
    return Columns(text, labels, len(fields), header)


def find_text_column(
    path: Path, line: int, fields: Sequence[str], column: str, *, kept: bool
) -> Columns:
    """The column of texts in a table to be labelled, which may lack one of labels.

    Args:
      path, line, fields: the first row.
      column: name or number from 1; "" = a known name, else the first of two.
      kept: the column is that of training, which the table need not have.

    Raises:
      DataError: no such column, or it cannot be seen which.
    """
    table = _Row(path, line, fields)
    texts = table.known(TEXT_NAMES, _FIRST_TEXTS) or table.known(_EITHER)
    if column and (not kept or table.has(column)):
        text, named = table.given("text", column)
        assert text is not None
        return Columns(text, None, len(fields), named or text in texts)
    if not texts and len(fields) > 2:
        raise table.unclear()
    return Columns(table.one("text", texts or [0]), None, len(fields), bool(texts))


def find_keys(
    path: Path, line: int, keys: Sequence[str], reading: Reading
) -> tuple[str | None, str | None]:
    """Keys of the text and of the labels in an object of JSON Lines; None = there is none.

    Raises:
      DataError: several could be meant.
    """
    table = _Row(path, line, keys, "keys")
    texts, tags = table.known(TEXT_NAMES, _FIRST_TEXTS), table.known(LABEL_NAMES, _FIRST_LABELS)
    either = table.known(_EITHER)
    texts, tags = texts or (either if tags else []), tags or (either if texts else [])
    if reading.text_column:
        texts = table.known(frozenset([normal(reading.text_column)]))
    if reading.label_column:
        tags = table.known(frozenset([normal(reading.label_column)]))
    text = keys[table.one("text", texts)] if texts else None
    return text, keys[table.one("label", tags)] if tags else None


def find_text_key(
    path: Path, line: int, keys: Sequence[str], column: str, *, kept: bool
) -> str | None:
    """The key of the text in an object to be labelled, as `find_text_column`; None = none."""
    table = _Row(path, line, keys, "keys")
    texts = table.known(TEXT_NAMES, _FIRST_TEXTS) or table.known(_EITHER)
    if column and (not kept or table.has(column)):
        texts = table.known(frozenset([normal(column)]))
    return keys[table.one("text", texts)] if texts else None


@dataclasses.dataclass
class _Row:
    """The first row of a table, which may hold names."""

    path: Path
    line: int
    fields: Sequence[str]
    what: str = "columns"

    def __post_init__(self) -> None:
        self.names = [normal(field) for field in self.fields]

    def has(self, column: str) -> bool:
        """Whether there is a column of this name or number."""
        return normal(column) in self.names or self._is_number(column)

    def _is_number(self, column: str) -> bool:
        is_number = column.isascii() and column.isdigit()
        return is_number and 1 <= int(column) <= len(self.fields)

    def given(self, kind: str, column: str) -> tuple[int | None, bool]:
        """The place of a column that a flag names, and whether its name stands in the row."""
        if not column:
            return None, False
        if normal(column) in self.names:
            return self.names.index(normal(column)), True
        if self._is_number(column):
            return int(column) - 1, False
        raise problem(
            self.path,
            self.line,
            self._found(),
            f"one called {column}, as --{kind}_column={column} says",
            "Give a name of the first row, or a number from 1.",
        )

    def known(self, known: frozenset[str], first: Sequence[str] = ()) -> list[int]:
        """Places of known names; a name of ``first`` stands for all of them."""
        for name in first:
            if name in self.names:
                return [self.names.index(name)]
        return [i for i, name in enumerate(self.names) if name in known]

    def one(self, kind: str, places: Sequence[int]) -> int:
        """The only place.

        Raises:
          DataError: there are several.
        """
        if len(places) > 1:
            which = " or ".join(f"--{kind}_column={self.fields[i].strip()}" for i in places)
            raise problem(
                self.path, self.line, self._found(), f"one column of {kind}s", f"Say {which}."
            )
        return places[0]

    def unclear(self) -> DataError:
        """The error where no names are known."""
        if len(self.fields) == 1:
            return problem(self.path, self.line, "1 columns", "2", ADVICE)
        return problem(
            self.path,
            self.line,
            self._found(),
            "2, one of texts and one of labels, or their usual names in the first row",
            "Say which they are, by the names in the first row or by numbers from 1, as in "
            "--text_column=1 --label_column=2.",
        )

    def _found(self) -> str:
        return f"{len(self.fields)} {self.what} ({', '.join(self.fields)[:200]})"
