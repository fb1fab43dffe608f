"""From a built corpus to a bucket to a run of two ranks that share a cache smaller than the corpus;
killed; resumed.
"""

import base64
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from data_pipeline.corpora import manifest
from data_pipeline.corpora.corpus import Corpus
from data_pipeline.corpora.shard_cache import GIB
from foundation import files
from pretrain.cli import main as pretrain
from pretrain.recovery.faults import VARIABLE
from pretrain.rundir.compare_runs import differing_losses
from pretrain.rundir.events import TrainingEnded
from pretrain.rundir.history import find_events
from pretrain.rundir.run_dir import RunDir
from tests.helpers.corpora import make_tiny_corpus
from tests.helpers.forked_ranks import ForkedRanks
from tests.helpers.stores import FileServer, put_directory

STEPS, KILLED_AT, SAVED_AT = 14, 10, 7
SETTINGS = f"""name: tiny
model: {{num_layers: 2, d_model: 16, num_heads: 2, memory_length: 8, dropout: 0.1}}
data: {{lanes: 2, segment_length: 512}}
optim: {{steps: {STEPS}}}
engine: {{kind: torch}}
checkpoint: {{interval: {SAVED_AT}}}
evaluation: {{interval: 0, lanes: 2, max_tokens: 2000}}
metrics: {{interval: 1, tensorboard: false}}
"""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_corpus(tmp_path_factory.mktemp("corpus") / "books", documents=300)


@pytest.mark.slow
def test_a_bucket_trains_as_the_disk_does_even_killed(corpus, tmp_path, bucket, s3_endpoint):
    url = f"{bucket}/books"
    put_directory(s3_endpoint, corpus, url)
    shards = Corpus.open(corpus / "train").manifest.shards
    limit = 13 * max(shard.size for shard in shards)
    assert limit < sum(shard.size for shard in shards) / 2
    experiment = tmp_path / "tiny.yaml"
    experiment.write_text(SETTINGS)
    local, remote = RunDir(tmp_path / "local"), RunDir(tmp_path / "remote")
    train, cache = ["train", str(experiment)], tmp_path / "cache"
    assert pretrain([*train, f"--run-dir={local.path}", f"data.path={corpus}"]) == 0
    from_bucket = [f"data.cache.directory={cache}", f"data.cache.gib={limit / GIB}"]
    command = [*train, f"--run-dir={remote.path}", f"data.path={url}", *from_bucket]
    program = partial(pretrain, command)
    killed = ForkedRanks(2, program, tmp_path, **{VARIABLE: f"sigkill@{KILLED_AT}"})
    assert killed.wait() == [-9, -9]
    assert sum(path.stat().st_size for path in (cache / "shards").iterdir()) <= limit
    assert ForkedRanks(2, program, tmp_path).wait() == [0, 0]
    assert differing_losses(local, remote, 1e-5) == []
    end = find_events(remote.ledger.read(), TrainingEnded)[-1]
    assert end.tokens_of_corpora == {f"{url}/train": STEPS * 2 * 512}


def test_a_run_with_a_password_resumes_and_shows_it_nowhere(corpus, tmp_path, capfd, monkeypatch):
    password = "correct-horse"
    experiment = tmp_path / "tiny.yaml"
    experiment.write_text(SETTINGS)
    parsed: list[Any] = []
    parse = manifest.from_tree

    def counted(kind: Any, tree: Any) -> Any:
        parsed.append(kind)
        return parse(kind, tree)

    monkeypatch.setattr(manifest, "from_tree", counted)
    monkeypatch.setattr(files, "SETTLED_NS", 0)  # else a fast start parses a new file again
    with FileServer(corpus) as server:
        server.authorization = f"Basic {base64.b64encode(f'me:{password}'.encode()).decode()}"
        host = server.url.removeprefix("http://")
        command = ["train", str(experiment), f"--run-dir={tmp_path / 'run'}"]
        command += [f"data.cache.directory={tmp_path / 'cache'}"]

        assert pretrain([*command, f"data.path=http://me:{password}@{host}"]) == 2
        assert "PASSWORD@HOST" in capfd.readouterr().err
        by_reference = [*command, f"data.path=http://me:env:BUCKET_PASSWORD@{host}"]
        assert pretrain([*by_reference, "optim.steps=2"]) == 2
        assert "BUCKET_PASSWORD" in capfd.readouterr().err
        monkeypatch.setenv("BUCKET_PASSWORD", f"{password}@{host}")
        for steps in (2, 4):
            assert (
                pretrain([*by_reference, f"optim.steps={steps}", "optim.schedule.shape=constant"])
                == 0
            )
        assert server.requests["manifest.json"] == 2, "of both splits"
        assert 4 <= len(parsed) < 10, "two of them as they arrived"
    shown = "".join(capfd.readouterr())
    written = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert b"me:env:BUCKET_PASSWORD@" in written
    for secret in (password, server.authorization.split()[1]):
        assert secret not in shown
        assert secret.encode() not in written
