"""`clip-train shards`: tables and folders of real images become shards that train; what cannot be used is reported."""

from __future__ import annotations

import csv
import json
import shlex
import tarfile
from pathlib import Path

import pyarrow
import pytest
import torch
from PIL import Image
from pyarrow import parquet

from clip_train.data.config import DataConfig
from clip_train.data.loader import TrainLoader
from launcher.cli.main import main
from tests.data.shards import jpeg
from tests.data.test_transforms import bomb


def images(folder: Path, count: int) -> list[str]:
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(count):
        (folder / f"{i}.jpg").write_bytes(jpeg(i))
    return [f"{i}.jpg" for i in range(count)]


def write_table(path: Path, rows: list[dict], delimiter: str = ",") -> Path:
    with path.open("w", newline="") as file:
        table = csv.DictWriter(file, list(rows[0]), delimiter=delimiter)
        table.writeheader()
        table.writerows(rows)
    return path


def members(folder: Path) -> dict[str, bytes]:
    found = {}
    for path in sorted(folder.glob("*.tar")):
        with tarfile.open(path) as tar:
            found |= {name: tar.extractfile(name).read() for name in tar.getnames()}  # type: ignore[union-attr]
    return found


@pytest.mark.parametrize(
    "kind",
    ["csv", "tabs in a csv", "tsv", "jsonl", "parquet", "folder", "metadata"],
)
def test_every_kind_of_source_becomes_the_same_shards(kind, tmp_path, capsys):
    source = tmp_path / "photos"
    names = images(source, 5)
    rows = [{"file_name": name, "caption": f"picture {name}"} for name in names]
    place = source
    if kind == "folder":
        for row in rows:
            (source / row["file_name"]).with_suffix(".txt").write_text(row["caption"] + "\n")
    elif kind == "metadata":
        write_table(source / "metadata.csv", rows)
    elif kind == "parquet":
        place = source / "x.parquet"
        table = pyarrow.table({name: [row[name] for row in rows] for name in rows[0]})
        parquet.write_table(table, place)
    elif kind == "jsonl":
        place = source / "x.jsonl"
        place.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        place = write_table(
            source / ("x.tsv" if kind == "tsv" else "x.csv"), rows, "," if kind == "csv" else "\t"
        )
    assert (
        main(["shards", str(place), str(tmp_path / "out"), "--per-shard", "2", "--workers", "1"])
        == 0
    )
    found = members(tmp_path / "out")
    assert found == {
        f"{i:09d}.{end}": content
        for i, name in enumerate(names)
        for end, content in (
            ("jpg", (source / name).read_bytes()),
            ("txt", f"picture {name}".encode()),
        )
    }
    out = capsys.readouterr().out
    assert "3 shards, 5 samples" in out and "{00000..00002}.tar" in out
    config = DataConfig(train=f"{tmp_path}/out/*.tar", workers=0, lanes=1)
    batch = next(iter(TrainLoader(config, image_size=16, context_length=77, global_size=5, seed=0)))
    assert len(batch) == 5 and not batch.bad_samples


def test_columns_of_captions_can_be_drawn_from(tmp_path, capsys):
    names = images(tmp_path, 4)
    rows = [
        {"image": name, "alt": "short" * (i < 3), "long": f"long {i}"}
        for i, name in enumerate(names)
    ]
    table = write_table(tmp_path / "x.csv", rows)
    assert (
        main(
            [
                "shards",
                str(table),
                str(tmp_path / "out"),
                "--caption-key",
                "alt,long",
                "--workers",
                "1",
            ]
        )
        == 0
    )
    found = members(tmp_path / "out")
    assert [found[f"{i:09d}.txt"] for i in (0, 3)] == [b"short", b"long 3"]
    config = DataConfig(
        train=f"{tmp_path}/out/*.tar", caption_key={"alt": 1e-9, "long": 1}, workers=0, lanes=1
    )
    captions: list[str] = []

    def tokenizer(texts: list[str]) -> torch.Tensor:
        captions.extend(texts)
        return torch.zeros(len(texts), 1, dtype=torch.int64)

    next(
        TrainLoader(
            config,
            image_size=8,
            context_length=1,
            global_size=4,
            seed=0,
            tokenizer=tokenizer,
            lengths=None,
        )
    )
    assert sorted(captions) == [f"long {i}" for i in range(4)]


def test_what_cannot_be_used_is_left_out_and_reported(tmp_path, capsys):
    names = images(tmp_path, 3)
    (tmp_path / "cut.jpg").write_bytes(jpeg(9)[:200])
    rows = [{"filepath": name, "title": "", "text": f"a {name}"} for name in names]
    rows += [
        {"filepath": "missing.jpg", "title": "x", "text": ""},
        {"filepath": "cut.jpg", "title": "x", "text": ""},
    ]
    rows += [
        {"filepath": "0.jpg", "title": " ", "text": ""},
        {"filepath": "https://a/b.jpg", "title": "x", "text": ""},
    ]
    line = [
        "shards",
        str(write_table(tmp_path / "x.csv", rows)),
        str(tmp_path / "out"),
        "--caption-key",
        "title,text",
    ]
    assert main([*line, "--per-shard", "4", "--workers", "2"]) == 0
    out = capsys.readouterr().out
    assert "4 rows were left out" in out and "3 samples" in out
    for reason in (
        "image cannot be read: No such file",
        "image does not decode, such as cut.jpg",
        "caption is empty",
        "is a URL",
    ):
        assert reason in out
    found = members(tmp_path / "out")
    assert len(found) == 9 and json.loads(found["000000000.json"]) == {"text": ["a 0.jpg"]}
    stats = json.loads((tmp_path / "out" / "00001_stats.json").read_text())
    assert stats["count"] == 3 and stats["successes"] == 0


def test_several_captions_are_kept(tmp_path, capsys):
    (name,) = images(tmp_path, 1)
    (tmp_path / "x.jsonl").write_text(
        json.dumps({"image": name, "captions": ["one", "", "two"]}) + "\n"
    )
    assert main(["shards", str(tmp_path / "x.jsonl"), str(tmp_path / "out")]) == 0
    found = members(tmp_path / "out")
    assert found["000000000.txt"] == b"one" and json.loads(found["000000000.json"]) == {
        "captions": ["one", "two"]
    }


def test_it_continues_after_a_stop_and_refuses_other_files(tmp_path, capsys):
    names = images(tmp_path, 6)
    table = write_table(tmp_path / "x.csv", [{"filepath": name, "title": name} for name in names])
    line = ["shards", str(table), str(tmp_path / "out"), "--per-shard", "2", "--workers", "1"]
    assert main(line) == 0
    before = members(tmp_path / "out")
    (tmp_path / "out" / "00001.tar").unlink()
    kept = (tmp_path / "out" / "00000.tar").stat().st_mtime_ns
    assert main(line) == 0
    assert members(tmp_path / "out") == before
    assert (tmp_path / "out" / "00000.tar").stat().st_mtime_ns == kept
    capsys.readouterr()
    assert main([*line[:3], "--per-shard", "3"]) == 2
    assert "per_shard: 2, now 3" in capsys.readouterr().err


@pytest.mark.parametrize(
    "name, content, said",
    [
        ("x.csv", "a,b\n1,2\n", "its columns are a, b: give --image-key NAME"),
        ("x.csv", "", "has no rows"),
        ("x.jsonl", "{'a'}\n", "line 1 is not JSON"),
        ("x.jsonl", b'{"a": "caf\xe9"}\n', "line 1 is not JSON"),
        ("x.csv", "image,title\n0.jpg,x\n".encode("utf-16"), "line 1 has a byte that is not UTF-8"),
        ("x.doc", "", "cannot be read as a table"),
        ("y/0.jpg", "x", "has no image with a caption"),
    ],
)
def test_mistakes(name, content, said, tmp_path, capsys):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    source = path.parent if name.startswith("y/") else path
    assert main(["shards", str(source), str(tmp_path / "out")]) == 2
    assert said in capsys.readouterr().err
    assert not list(tmp_path.glob("out/*.tar"))


def typed(line: list[str], capsys) -> tuple[str, str]:
    assert main(line) == 0
    return capsys.readouterr()


def test_label_names_become_a_field_and_a_file_of_classes(tmp_path, capsys):
    names = images(tmp_path, 5)
    kinds = ["911", " owl ", "", "red fox", "red fox"]
    rows = [
        {"filepath": name, "title": f"a {name}", "kind": kind, "city": "Öland", "n": i}
        for i, (name, kind) in enumerate(zip(names, kinds, strict=True))
    ]
    table = write_table(tmp_path / "x.csv", rows)
    line = ["shards", str(table), str(tmp_path / "out"), "--workers", "1", "--label-key", "kind"]
    out, _ = typed([*line, "--keep-columns", "city,n"], capsys)
    found = members(tmp_path / "out")
    assert json.loads(found["000000000.json"]) == {"city": "Öland", "n": "0", "kind": "911"}
    assert json.loads(found["000000001.json"])["kind"] == "owl"
    assert json.loads(found["000000002.json"]) == {"city": "Öland", "n": "2"}
    assert json.loads(found["000000003.json"])["kind"] == "red fox"
    assert not [name for name in found if name.endswith(".cls")]
    file = tmp_path / "out" / "classes.json"
    assert json.loads(file.read_text()) == {
        "classnames": ["911", "owl", "red fox"],
        "templates": ["a photo of a {}."],
        "label_key": "kind",
    }
    assert "1 samples have no label in kind" in out
    assert f"3 names in kind; evaluate.zero_shot_classes={file}" in out
    file.write_text(file.read_text().replace("a photo of a", "a drawing of a"))
    typed([*line, "--keep-columns", "city,n"], capsys)  # again: what the user wrote stays
    assert "a drawing of a" in file.read_text()
    assert main([*line[:-1], "city", "--keep-columns", "city,n"]) == 2
    assert "label_key: kind, now city" in capsys.readouterr().err


def test_templates_are_those_of_the_captions(tmp_path, capsys):
    names = images(tmp_path, 8)
    captions = [
        "A owl, up",
        "a Owl, up",
        "a red fox, up",
        "owl",
        "red fox",
        "an owlet",
        "owl or owl",
        "an owlet",
    ]
    kinds = ["owl", "owl", "red fox", "owl", "red fox", "owl", "owl", "owl"]
    rows = [
        {"image": name, "title": caption, "kind": kind}
        for name, caption, kind in zip(names, captions, kinds, strict=True)
    ]
    table = write_table(tmp_path / "x.csv", rows)
    line = ["shards", str(table), str(tmp_path / "out"), "--label-key", "kind", "--per-shard", "3"]
    out, _ = typed([*line, "--workers", "1"], capsys)
    # "an {}et" and "{} or {}" are none, and "A {}, up" is seen once
    classes = json.loads((tmp_path / "out" / "classes.json").read_text())
    assert sorted(classes["templates"]) == ["a {}, up", "{}"]
    assert "templates: 2, such as 'a {}, up'" in out


def test_labels_that_are_numbers_become_cls(tmp_path, capsys):
    names = images(tmp_path, 4)
    labels = [7, 0.0, [3], "11"]
    lines = [
        json.dumps({"image": name, "caption": name, "y": label})
        for name, label in zip(names, labels, strict=True)
    ]
    (tmp_path / "x.jsonl").write_text("\n".join(lines))
    line = ["shards", str(tmp_path / "x.jsonl"), str(tmp_path / "out"), "--workers", "1"]
    out, _ = typed([*line, "--label-key", "y"], capsys)
    found = members(tmp_path / "out")
    assert [found[f"{i:09d}.cls"] for i in range(4)] == [b"7", b"0", b"3", b"11"]
    assert "numbers from 0 to 11 as .cls" in out and not (tmp_path / "out/classes.json").exists()


def test_a_folder_has_no_column_for_labels(tmp_path, capsys):
    images(tmp_path / "photos", 1)
    (tmp_path / "photos" / "0.txt").write_text("x")
    line = ["shards", str(tmp_path / "photos"), str(tmp_path / "out"), "--label-key", "kind"]
    assert main(line) == 2
    assert "--label-key (kind)" in capsys.readouterr().err
    table = write_table(tmp_path / "x.csv", [{"filepath": "photos/0.jpg", "title": "x"}])
    assert main(["shards", str(table), *line[2:]]) == 2
    assert "has no column kind; its columns are filepath, title" in capsys.readouterr().err


def test_rows_with_an_unclosed_quote_are_left_out_and_reported(tmp_path, capsys):
    images(tmp_path, 8)
    rows = [
        '0.jpg,"a 5"" screen, in\ntwo lines"',  # a text of two lines, as it may be
        '1.jpg,"open to the next quote',
        '2.jpg,"closed"',
        '3.jpg,"open, and closed by a bare one',
        '4.jpg,a 7" screen',
        '5.jpg,"said "so" once"',
        "6.jpg,red, round",
        '7.jpg,"open to the end',
    ]
    table = tmp_path / "x.csv"
    table.write_text("filepath,title\n" + "\n".join(rows) + "\n")
    out, _ = typed(["shards", str(table), str(tmp_path / "out"), "--workers", "1"], capsys)
    found = members(tmp_path / "out")
    texts = [found[name].decode() for name in sorted(found) if name.endswith(".txt")]
    assert texts == ['a 5" screen, in\ntwo lines']
    assert 'write "" for a quote within a quoted text' in out and "such as line 5" in out
    assert "1 more cells than columns" in out and "such as line 9" in out
    left = json.loads((tmp_path / "out" / "00000_stats.json").read_text())["left_out"]
    assert [place for place, _ in left] == [f"line {i}" for i in (5, 7, 8, 9, 10)]  # where it ends


@pytest.mark.parametrize("options", [[], ["--label-key", "kind"]])
def test_rows_that_are_not_utf8_are_left_out_and_reported(options, tmp_path, capsys):
    images(tmp_path, 3)
    rows = ["0.jpg,a café,x", "1.jpg,a café,x".encode("latin-1"), "2.jpg,a \ufffd,x"]
    lines = [row if isinstance(row, bytes) else row.encode() for row in ["photo,title,kind", *rows]]
    (tmp_path / "x.csv").write_bytes(b"\n".join(lines))
    table, folder = str(tmp_path / "x.csv"), str(tmp_path / "out")
    out, _ = typed(["shards", table, folder, "--workers", "1", *options], capsys)
    assert "1 a byte that is not UTF-8: save the table as UTF-8, such as line 3" in out
    found = members(tmp_path / "out")
    texts = [found[name].decode() for name in sorted(found) if name.endswith(".txt")]
    assert texts == ["a café", "a \ufffd"]


def test_a_caption_too_long_for_the_index_is_left_out(tmp_path, capsys):
    names = images(tmp_path, 3)
    texts = ["ä" * 16_384, "ä" * 16_385, "x" * 54_000]
    rows = [{"image": n, "caption": t} for n, t in zip(names, texts, strict=True)]
    table = write_table(tmp_path / "x.csv", rows)
    out, _ = typed(["shards", str(table), str(tmp_path / "out"), "--workers", "1"], capsys)
    assert "2 caption is too long, such as 1.jpg" in out and "cannot be used" not in out
    assert [name for name in members(tmp_path / "out") if name.endswith(".txt")] == [
        "000000000.txt"
    ]


def test_rows_that_are_identical_are_counted_and_one_is_named(tmp_path, capsys):
    """Over shards and workers, also of an earlier run; not rows that are left out, nor rows that share one part."""
    images(tmp_path, 4)
    (tmp_path / "copy.jpg").write_bytes((tmp_path / "1.jpg").read_bytes())
    rows = ["0.jpg,x", "none.jpg,x", "1.jpg,x", "0.jpg,y", "none.jpg,x", "2.jpg,x", "copy.jpg,x"]
    table, folder = tmp_path / "x.csv", tmp_path / "out"
    line = ["shards", str(table), str(folder), "--per-shard", "2", "--workers", "2"]
    table.write_text("\n".join(["image,caption", *rows, "3.jpg,x"]))
    out, _ = typed(line, capsys)
    example = "such as 000000006 (copy.jpg) to 000000002 (1.jpg): "
    assert f"1 rows are identical to an earlier one, {example}" in out
    (folder / "00003.tar").unlink()
    assert "1 rows are identical" in typed(line, capsys)[0]
    (tmp_path / "y.csv").write_text("\n".join(["image,caption", *rows[:-1]]))
    out, _ = typed(["shards", str(tmp_path / "y.csv"), f"{folder}2"], capsys)
    assert "rows were left out" in out and "rows are identical" not in out


def test_the_example_of_identical_images_names_their_files(tmp_path, capsys):
    """The first image that repeats another one, whatever its contents are."""
    photos, out = tmp_path / "photos", tmp_path / "out"
    for folder in ("a", "b", "c"):
        for name in images(photos / folder, 3):
            (photos / folder / name).with_suffix(".txt").write_text(f"picture {name}")
    (photos / "a" / "0.txt").unlink()
    printed, _ = typed(["shards", str(photos), str(out), "--workers", "1"], capsys)
    example = "such as 000000004 (b/1.jpg) to 000000001 (a/1.jpg): "
    assert f"5 rows are identical to an earlier one, {example}" in printed


def test_a_caption_beside_an_image_may_have_a_suffix_in_capitals(tmp_path, capsys):
    """As the image's may. `.txt` comes before `.TXT`, and both before `.caption`."""
    photos, out = tmp_path / "photos", tmp_path / "out"
    for i, name in enumerate(images(photos, 3)):
        (photos / name).rename(photos / f"{i}.JPG")
    files = {"0.TXT": "a", "1.Caption": "b", "2.TXT": "x", "2.caption": "y", "2.txt": "c"}
    for name, text in files.items():
        (photos / name).write_text(text)
    (photos / "1.txt").symlink_to("a file that was removed")
    printed, _ = typed(["shards", str(photos), str(out), "--workers", "1"], capsys)
    found = members(out)
    assert [found[f"{i:09d}.txt"] for i in range(3)] == [b"a", b"b", b"c"]
    assert "left out" not in printed and "skipped" not in printed


def test_captions_of_several_lines_are_counted(tmp_path, capsys):
    """Also by a later run, which finds the shards written."""
    photos, out = tmp_path / "photos", tmp_path / "out"
    for name in images(photos, 4):
        (photos / name).with_suffix(".txt").write_text("\na frog\n")
    line = ["shards", str(photos), str(out), "--workers", "1", "--per-shard", "2"]
    assert "several lines" not in typed(line, capsys)[0]
    for name in ("0.txt", "3.txt"):
        (photos / name).write_text("a frog\nde.utf8=ein Frosch\n")
    line[2] = f"{out}2"
    for _ in range(2):
        assert "2 captions have several lines: training reads all lines" in typed(line, capsys)[0]
    assert members(Path(line[2]))["000000003.txt"] == b"a frog\nde.utf8=ein Frosch"


def test_quiet_draws_nothing(tmp_path, capsys):
    images(tmp_path, 1)
    table = write_table(tmp_path / "x.csv", [{"image": "0.jpg", "caption": "x"}])
    shards = ["shards", str(table), str(tmp_path / "out"), "--workers", "1"]
    index = ["index", f"{tmp_path}/out/*.tar"]
    assert "writing shards" in typed(shards, capsys)[1] and "indexing" in typed(index, capsys)[1]
    assert typed([*shards, "--quiet"], capsys)[1] == typed([*index, "--quiet"], capsys)[1] == ""


def test_the_next_line_names_a_recipe_that_is_there(tmp_path, capsys, monkeypatch):
    images(tmp_path, 1)
    table = write_table(tmp_path / "x.csv", [{"image": "0.jpg", "caption": "x"}])
    monkeypatch.chdir(tmp_path)
    out, _ = typed(["shards", str(table), "out", "--workers", "1"], capsys)
    words = shlex.split(out.splitlines()[-1])
    assert words[:3] == ["next:", "clip-train", "train"] and Path(words[3]).is_file()
    assert main([*words[2:], "--dry-run"]) == 0  # a recipe for so few samples


TEXTS = [f"a man {i}, walking" for i in range(4)]


def source_of(kind: str, folder: Path) -> Path:
    """A table of four images, as people have them."""
    names = images(folder, 4)
    rows = [{"image": name, "caption": text} for name, text in zip(names, TEXTS, strict=True)]
    lines = [json.dumps(row) for row in rows]
    contents = {
        "blank.jsonl": "\n" + "\n\n".join(lines) + "\n \n",
        "list.jsonl": f"[{', '.join(lines)}]",
        "results.csv": "image_name| comment_number| comment\n"
        + "".join(f'{name}| 0| "{text} .\n' for name, text in zip(names, TEXTS, strict=True)),
        "semicolons.csv": "filepath;caption\n"
        + "".join(f"{name};{text}\n" for name, text in zip(names, TEXTS, strict=True)),
        "blanks.csv": " filepath, caption \n"
        + "".join(f'{name}, "{text}"\n' for name, text in zip(names, TEXTS, strict=True)),
        "upper.csv": "Filepath,CAPTION\n"
        + "".join(f'{name},"{text}"\n' for name, text in zip(names, TEXTS, strict=True)),
    }
    if kind in contents:
        (folder / kind).write_text(contents[kind])
        return folder / kind
    data = folder / "hub" / "data"
    data.mkdir(parents=True)
    cells = [{"bytes": (folder / name).read_bytes(), "path": name} for name in names]
    for number in range(2):
        part = slice(2 * number, 2 * number + 2)
        table = pyarrow.table({"image": cells[part], "caption": TEXTS[part]})
        parquet.write_table(table, data / f"train-{number:05d}-of-00002.parquet")
    return folder / "hub" if kind == "a folder of parquet" else data / "train-*.parquet"


@pytest.mark.parametrize(
    "kind",
    [
        "blank.jsonl",
        "list.jsonl",
        "results.csv",
        "semicolons.csv",
        "blanks.csv",
        "upper.csv",
        "a folder of parquet",
        "a pattern",
    ],
)
def test_tables_as_people_have_them(kind, tmp_path, capsys):
    source = source_of(kind, tmp_path / "set")
    assert main(["shards", str(source), str(tmp_path / "out"), "--workers", "1"]) == 0
    printed = capsys.readouterr().out
    assert "4 samples" in printed and "left out" not in printed
    found = [text.decode() for name, text in members(tmp_path / "out").items() if "txt" in name]
    expected = TEXTS
    if kind == "results.csv":  # its quotes mean nothing
        expected = [f'"{text} .' for text in TEXTS]
    assert found == expected


def test_a_head_with_an_unclosed_quote(tmp_path, capsys):
    (tmp_path / "x.csv").write_text('filepath,"caption\n0.jpg,a text\n')
    assert main(["shards", str(tmp_path / "x.csv"), str(tmp_path / "out")]) == 2
    assert "line 1 has an unclosed quote" in capsys.readouterr().err


def test_splits_are_not_mixed(tmp_path, capsys):
    source = source_of("a folder of parquet", tmp_path / "set")
    part = source / "data" / "train-00000-of-00002.parquet"
    part.rename(part.with_name("test-00000-of-00001.parquet"))
    assert main(["shards", str(source), str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert "tables of 2 splits (test, train): give one, such as" in said
    assert f"{source}/data/train-*.parquet" in said


@pytest.mark.parametrize("listed", [False, True])
def test_classes_of_a_parquet_have_their_names(listed, tmp_path, capsys):
    """As Hugging Face's `datasets` declares them; -1 is no class."""
    names = images(tmp_path, 4)
    label = {"names": ["red fox", "barn owl", "cat"], "_type": "ClassLabel"}
    feature = {"feature": label, "_type": "Sequence"} if listed else label
    numbers = [2, 0, -1, 1]
    table = pyarrow.table(
        {
            "image": names,
            "caption": TEXTS,
            "kind": [[number] for number in numbers] if listed else numbers,
        }
    )
    info = {"info": {"features": {"kind": feature, "caption": {"_type": "Value"}}}}
    table = table.replace_schema_metadata({"huggingface": json.dumps(info)})
    parquet.write_table(table, tmp_path / "x.parquet")
    out = tmp_path / "out"
    assert main(["shards", str(tmp_path / "x.parquet"), str(out), "--label-key", "kind"]) == 0
    assert "1 samples have no label in kind" in capsys.readouterr().out
    kinds = [
        json.loads(text)["kind"] for name, text in members(out).items() if name.endswith(".json")
    ]
    assert kinds == ["cat", "red fox", "barn owl"]
    assert json.loads((out / "classes.json").read_text())["classnames"] == sorted(label["names"])


def test_transparent_images_are_counted_without_pillows_warnings(tmp_path, capfd):
    images(tmp_path, 1)
    Image.new("RGBA", (8, 8), (200, 0, 0, 90)).save(tmp_path / "1.png")
    Image.new("RGBA", (8, 8), (200, 0, 0, 255)).save(tmp_path / "2.png")
    (tmp_path / "3.png").write_bytes(bomb(9_500))  # Pillow warns about its size
    rows = [{"image": name, "caption": "a text"} for name in ("0.jpg", "1.png", "2.png", "3.png")]
    table = write_table(tmp_path / "x.csv", rows)
    assert main(["shards", str(table), str(tmp_path / "out"), "--quiet"]) == 0
    printed = capfd.readouterr()
    assert "1 images have transparent pixels: data.alpha=white" in printed.out
    assert "1 image has too many pixels, such as 3.png" in printed.out
    assert "Warning" not in printed.err
