"""Text before it is tokenised: nothing is cut or left out without a word, and what is no text is named by file and offset."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hzero.train import data, examples
from hzero.validation import ConfigError

WORDS = "words and wörds to train on, again and again\n"


def _group(path: Path, **more: Any) -> dict[str, Any]:
    return {"path": str(path), "max_bytes": None, "eval_share": 0.2, "cache_dir": str(path.parent / "cache"), **more}


def _prepare(group: dict[str, Any]) -> tuple[int, list[str]]:
    said: list[str] = []
    found = data.prepare(group, 300, 8, 1, said.append)
    return len(found.train) + len(found.evaluation), [line for line in said if not line.startswith("tokenising")]


def test_all_of_a_text_is_taken_and_a_cut_is_said(tmp_path: Path) -> None:
    book = tmp_path / "book.txt"
    book.write_text(WORDS * 200_000)  # 9.2 MB, more than the default of the standard library
    files, size = [book], book.stat().st_size
    assert sum(map(len, data.read_texts(files, 0))) == len(WORDS) * 200_000
    book.write_text(WORDS * 300)
    whole, said = _prepare(_group(book))
    assert not said
    cut, said = _prepare(_group(book, max_bytes=6000))
    assert cut < whole and said == [
        f"data.max_bytes: taking the first 6,000 of the {book.stat().st_size:,} bytes of {book}"
    ]
    assert size > 8_000_000
    for limit in range(8, 14):  # the umlaut is cut, and gives no character that is not in the text
        assert WORDS.startswith("".join(data.read_texts(files, limit)))


@pytest.mark.parametrize(
    ("place", "bad", "says"),
    [
        (100_000, b"\0", "a NUL byte at offset 100,000"),
        (100_000, b"\xff\xfe", "byte 0xff at offset 100,000"),
        (100_000, "ö".encode("latin-1"), "byte 0xf6 at offset 100,000"),
        (17, b"\xed\xa0\x80", "byte 0xed at offset 17"),  # half a surrogate pair
        (0, WORDS.encode("utf-16"), "byte 0xff at offset 0|a NUL byte at offset 3"),
    ],
)
def test_what_is_no_text_is_refused_by_name_and_left_out_of_a_folder(
    place: int, bad: bytes, says: str, tmp_path: Path
) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    good = ("a plain line of text\n" * 8000).encode()
    (texts / "good.txt").write_bytes(good)
    broken = texts / "broken.txt"
    broken.write_bytes(good[:place] + bad + good[place:])
    with pytest.raises(ConfigError, match=rf"data\.path: '{broken}' is not a text file of UTF-8: ({says})$"):
        _prepare(_group(broken, cache_dir=str(tmp_path / "cache")))
    assert not (tmp_path / "cache").exists()
    _, said = _prepare(_group(texts))
    (line,) = said
    assert line.startswith(f"warning: 1 files of {texts} are left out, since they are not text of UTF-8: {broken} (")
    good_alone, _ = _prepare(_group(texts / "good.txt", cache_dir=str(tmp_path / "cache")))
    assert good_alone == _prepare(_group(texts))[0]


def test_an_entry_of_the_cache_that_others_can_change_is_not_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    book = tmp_path / "book.txt"
    book.write_text(WORDS * 300)
    _prepare(_group(book))
    (entry,) = (tmp_path / "cache").iterdir()
    assert entry.stat().st_mode & 0o777 == 0o700

    def refused(change: Callable[[], None], says: str) -> None:
        change()
        with pytest.raises(ConfigError, match=rf"data\.cache_dir: not trusted: .*{says}") as error:
            _prepare(_group(book))
        assert "\n" not in str(error.value)

    refused(lambda: entry.chmod(0o770), r"can be written by its group or by others \(mode 770\)")
    entry.chmod(0o755)
    refused(lambda: (entry / "tokens.bin").chmod(0o666), "tokens.bin' can be written")
    entry.chmod(0o700)  # nobody else gets at the file
    _prepare(_group(book))
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    if entry.stat().st_uid:  # root is trusted
        refused(lambda: None, "belongs to user")
    else:
        _prepare(_group(book))
        os.chown(entry / "meta.json", 12, 12)
        refused(lambda: None, "meta.json' belongs to user 12")


def test_examples_are_utf8_and_errors_stay_on_one_line() -> None:
    for line, says in (
        (b'{"text": "\xff"}', "0xff"),
        (b'{"text": "\xed\xa0\x80"}', "0xed"),
        ('{"text": "a"}'.encode("utf-16"), "0xff"),
        (b'{"text": "\0"}', "not JSON"),
        (b'{"te\\nxt\\u001b[2J": 1}', r"te\nxt\x1b[2J;"),
    ):
        with pytest.raises(ConfigError) as error:
            examples._parse(line, "chat.jsonl:7")
        assert says in str(error.value) and "chat.jsonl:7" in str(error.value) and str(error.value).isprintable()
    assert examples._parse(b'\xef\xbb\xbf{"text": "a"}', "") == {"text": "a"}
