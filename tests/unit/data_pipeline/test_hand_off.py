"""Files in the layout of the tools that filter and remove near-duplicates (docs/ecosystem.md)."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pyarrow
import pyarrow.parquet

from data_pipeline.cli import main
from tests.helpers.corpora import documents_of


def write_gzip(path: Path, records: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt") as file:
        file.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in records)


def build(source: Path, output: Path, *flags: str) -> dict[str, str]:
    arguments = ["build", f"--input={source}", f"--output={output}", "--validation-fraction=0"]
    assert main([*arguments, "--tokenizer=bytes", *flags]) == 0
    return documents_of(output / "train")


def documents(prefix: str, count: int = 6) -> dict[str, str]:
    return {f"<urn:uuid:{prefix}-{n}>": f"text {prefix} {n}: \u00e4\u2603" for n in range(count)}


def of_datatrove(texts: dict[str, str]) -> list[dict]:
    """Records of its writers: fields without a value are left out."""
    metadata = {"url": "https://example.org/a", "dump": "CC-MAIN-2026-01", "language_score": 0.9}
    return [{"text": text, "id": name, "metadata": metadata} for name, text in texts.items()]


def test_json_lines_of_datatrove(tmp_path):
    texts = [documents("a"), documents("b")]
    for rank, each in enumerate(texts):
        write_gzip(tmp_path / "kept" / f"{rank:05d}.jsonl.gz", of_datatrove(each))
    # A task whose documents were all removed writes a valid archive of nothing.
    write_gzip(tmp_path / "kept" / "00002.jsonl.gz", [])
    found = build(tmp_path / "kept", tmp_path / "out", "--format=jsonl", "--shuffle-seed=1")
    assert found == texts[0] | texts[1]


def test_parquet_of_datatrove(tmp_path):
    (tmp_path / "kept").mkdir()
    batch = pyarrow.RecordBatch.from_pylist(of_datatrove(documents("c")))
    with pyarrow.parquet.ParquetWriter(tmp_path / "kept" / "00000.parquet", batch.schema) as file:
        file.write_batch(batch)
        file.write_batch(batch.slice(0, 0))
    assert build(tmp_path / "kept", tmp_path / "out", "--format=parquet") == documents("c")


def test_what_dolma_mixes(tmp_path, capsys):
    texts = documents("d")
    records = [
        {
            "id": name,
            "text": text,
            "source": "common-crawl",
            "added": "2026-01-01T00:00:00.000Z",
            "created": "2025-01-01T00:00:00.000Z",
            "metadata": {"url": "https://example.org"},
            "attributes": {"duplicate_paragraphs": [[0, 4, 1.0]]},
        }
        for name, text in texts.items()
    ]
    emptied = {**records[0], "id": "emptied", "text": ""}
    write_gzip(tmp_path / "clean/documents/web-0000.json.gz", [*records[:4], emptied])
    write_gzip(tmp_path / "clean/documents/web-0001.json.gz", records[4:])
    flags = ("--suffixes", ".json", ".jsonl")
    assert build(tmp_path / "clean/documents", tmp_path / "out", *flags) == texts
    assert "1 unusable records were skipped" in capsys.readouterr().out

    attributes = [{"id": name, "source": "x", "attributes": {"tag": 1}} for name in texts]
    write_gzip(tmp_path / "clean/attributes/tags/web-0000.json.gz", attributes)
    assert build(tmp_path / "clean", tmp_path / "both", *flags) == texts
    rejects = (tmp_path / "both" / "rejects.jsonl").read_text()
    assert rejects.count("no field 'text'") == len(attributes)
