"""Files of tokens, as other systems write them: with their own libraries where there are some."""

import struct
from pathlib import Path

import numpy as np

END = 320
DOCUMENTS = [[5, 6, 7], [8], [9, 10, 11, 12], [319] * 40, [7, 0]]


def write_megatron(path: Path, documents: list[list[int]], dtype="<u2", code=8) -> None:
    """As Megatron-LM documents its indexed data sets: two sequences in the first document."""
    sequences = [documents[0][:1], documents[0][1:], *documents[1:]]
    arrays = [np.array(each, dtype) for each in sequences]
    path.with_suffix(".bin").write_bytes(b"".join(each.tobytes() for each in arrays))
    sizes = [each.nbytes for each in arrays]
    path.with_suffix(".idx").write_bytes(
        b"MMIDIDX\x00\x00"
        + struct.pack("<QBQQ", 1, code, len(arrays), len(documents) + 1)
        + np.array([len(each) for each in arrays], "<i4").tobytes()
        + np.array([0, *np.cumsum(sizes)[:-1]], "<i8").tobytes()
        + np.array([0, *range(2, len(arrays) + 1)], "<i8").tobytes()
    )


def write_mds(folder: Path, columns: dict[str, str], samples: list[dict], **settings) -> None:
    from streaming import MDSWriter

    with MDSWriter(out=str(folder), columns=columns, **settings) as writer:
        for sample in samples:
            writer.write(sample)


def with_ends(dtype: str) -> np.ndarray:
    return np.array([token for each in DOCUMENTS for token in (*each, END)], dtype)


def make_input(kind: str, folder: Path) -> dict[str, object]:
    """Write DOCUMENTS, and return the settings that read them."""
    if kind == "megatron":
        write_megatron(folder / "x", [[*each, END] for each in DOCUMENTS])
        return {"format": "megatron"}
    if kind == "nanoGPT":
        with_ends("uint16").tofile(folder / "train.bin")
        return {"format": "array"}
    if kind == "numpy":
        np.save(folder / "train.npy", with_ends("int64"))
        return {"format": "array"}
    if kind == "int32":
        with_ends("int32").tofile(folder / "train.bin")
        return {"format": "array", "token_dtype": "int32"}
    if kind == "mds":
        samples = [{"tokens": np.array(each, np.int32), "n": 1} for each in DOCUMENTS]
        columns = {"tokens": "ndarray:int32", "n": "int"}
        write_mds(folder, columns, samples, compression="zstd")
        return {"text_field": "tokens"}
    if kind == "mds of bytes":
        samples = [{"tokens": np.array(each, np.int64).tobytes()} for each in DOCUMENTS]
        write_mds(folder, {"tokens": "bytes"}, samples)
        return {"text_field": "tokens", "token_dtype": "int64"}
    import datasets

    table = datasets.Dataset.from_dict({"input_ids": DOCUMENTS})
    if kind == "parquet":
        table.to_parquet(str(folder / "x.parquet"))
    else:
        table.save_to_disk(str(folder))
    return {"text_field": "input_ids"}
