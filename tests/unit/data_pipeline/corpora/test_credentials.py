"""Passwords and signatures in URLs: hidden in all text, refused in settings, named by reference."""

import contextlib
import time
from pathlib import Path

import pytest

from data_pipeline.cli import main
from data_pipeline.config import CorpusConfig, MixturePart
from data_pipeline.corpora.fetch import NotFetchedError, fetch_manifest
from data_pipeline.corpora.manifest import Manifest, ShardInfo
from data_pipeline.corpora.stores import store_at
from data_pipeline.corpora.web_requests import redirect_problem
from foundation.errors import ConfigError, DataError, UserError
from foundation.settings import parse_config
from pretrain.config.cluster import ClusterConfig
from pretrain.config.run import DataConfig
from tests.helpers.stores import QUICK, FileServer


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://me:secret@host/a", "https://***@host/a"),
        ("https:/me:secret@host/a", "https:/***@host/a"),  # as pathlib writes it
        ("HTTPS://secret@host", "HTTPS://***@host"),
        ("at https://me:sec/ret@host and s3://me:secret@b", "at https://***@host and s3://***@b"),
        ("https://me:sec@ret@host/", "https://***@host/"),
        ("(https://h/a?X-Amz-Signature=secret&b=1)", "(https://h/a?***"),
        ("https://me:env:NAME@host/a", "https://me:env:NAME@host/a"),
        ("https://me:env:secret-1@host", "https://***@host"),
        ("s3://bucket/data@2024 http://h:80/a@b/c", "s3://bucket/data@2024 http://h:80/a@b/c"),
        ("me@host: /a/b@c", "me@host: /a/b@c"),
        ("gs://b/c?sig=secret and hf://d/e#secret", "gs://b/c?*** and hf://d/e#***"),
        ("https://h/o'brien?sig=secret", "https://h/o'brien?***"),
        ("docker://me:secret@r.io#a/b", "docker://***@r.io#a/b"),
        ("ftp://me:sec ret@h", "ftp://***@h"),
        ("https:\\/\\/me:secret@h", "https:\\/\\/***@h"),
        ("//me:secret@h and //me:env:NAME@h", "//***@h and //me:env:NAME@h"),
        (f"HF_TOK: hf_{'a' * 34}", "HF_TOK: ***"),
        (f"sk-{'a1' * 20}, AKIA{'X' * 16}", "***, ***"),
        ("http://host:8080 me@h", "http://host:8080 me@h"),
        ("docker://$oauthtoken@nvcr.io#a/b:1@sha256:0",) * 2,
    ],
)
def test_users_passwords_and_queries_of_urls_are_hidden_and_nothing_else(text, shown):
    assert str(UserError(text)) == shown


@pytest.mark.parametrize(
    "text",
    ["a" * 200_000 + " :/", "a" * 200_000 + ":/", "a:/" * 100_000, "@" + "a:/" * 100_000]
    + ["a:/" * 100_000 + end for end in ("@", "?", '?"', "#'x", ":80/@")]
    + ["a:" + "/" * 200_000 + "@", "a://b@" * 40_000, "a://b?'" * 40_000, "a:/b:" + "1" * 200_000],
)
def test_hiding_takes_time_in_proportion_to_the_text(text):
    start = time.process_time()
    assert str(UserError(text))
    with contextlib.suppress(ConfigError):
        parse_config(DataConfig, {"path": text}, "a.yaml")
    assert time.process_time() - start < 2


def test_a_url_that_is_cut_short_in_a_message_shows_no_password():
    url = f"https://me:{'secret' * 20}@host"
    for tree in ({"lanes": url}, {"mixture": url}, {url: 1}, {"mixture": [{"weight": url}]}):
        with pytest.raises(ConfigError) as error:
            parse_config(DataConfig, tree, "a.yaml")
        assert "secret" not in str(error.value)


SECRET_URLS = [
    "https://me:secret@host/corpus",
    "https:/secret@host/corpus",
    "s3://key:secret@bucket/corpus",
    "s3://key:env:NAME@bucket/corpus",
    "https://host/corpus?X-Amz-Signature=secret",
    "https://host/corpus?token=secret",
    "https://host/corpus#token=secret",
    "gs://host/corpus?token=secret",
    "s3://host/corpus#secret",
]


@pytest.mark.parametrize("url", SECRET_URLS)
def test_settings_and_commands_refuse_a_secret_in_a_url_without_showing_it(url, capsys):
    for schema, tree in (
        (DataConfig, {"path": url}),
        (DataConfig, {"mixture": [{"path": url}]}),
        (MixturePart, {"path": url}),
    ):
        with pytest.raises(ConfigError, match="path") as error:
            parse_config(schema, tree, "a.yaml")
        assert "secret" not in str(error.value)
    for command in (["verify", url], ["inspect", url]):
        assert main(command) == 2
        shown = capsys.readouterr()
        assert "secret" not in shown.out + shown.err
        assert len(shown.err.splitlines()) == 1


@pytest.mark.parametrize(
    "tree",
    [
        {"environment": {"https_proxy": "http://me:secret@proxy:80"}},
        {"environment": {"A": "--a --url=http://me:secret@proxy:80"}},
        {"container_image": "docker://me:secret@host/image"},
        {"setup": ["curl https://host/x?sig=secret"]},
        {"options": {"comment": "s3://me:secret@bucket"}},
        *(
            {"environment": {name: "secret"}}
            for name in ("HF_PAT", "WANDB_APIKEY", "SECRETKEY", "MY_PASSPHRASE", "AUTH_HEADER")
            + ("AZURE_STORAGE_CONNECTION_STRING", "AWS_ACCESS_KEY_ID", "DB_PWD", "SENTRY_DSN")
        ),
    ],
)
def test_no_setting_of_a_cluster_holds_a_secret(tree):
    with pytest.raises(ConfigError) as error:
        parse_config(ClusterConfig, {**tree, "ranks_per_node": 1}, "c.yaml")
    assert "secret@" not in str(error.value)
    assert "=secret" not in str(error.value)


def test_a_cluster_may_name_plain_images_and_variables():
    names = ("NCCL_DEBUG", "TOKENIZERS_PARALLELISM", "NCCL_IB_PKEY", "KEYRING", "MAX_TOKENS")
    environment = {**dict.fromkeys(names, "1"), "PATH": "/a", "http_proxy": "http://proxy:80"}
    image = "docker://$oauthtoken@nvcr.io#nvidia/pytorch:24.01-py3"
    tree = {"environment": environment, "container_image": image, "ranks_per_node": 1}
    assert parse_config(ClusterConfig, tree, "c.yaml").container_image == image


def test_a_reference_is_a_plain_setting():
    path = Path("https://me:env:NAME@host/corpus")
    assert DataConfig(path=path).path == path
    assert CorpusConfig(input=(Path("data@home"),), output=Path("out")).input


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    shard = ShardInfo("a.mds", 3, 30, 15, 99, "a" * 64, 120, 110, "b" * 64)
    directory = tmp_path_factory.mktemp("served")
    Manifest("uint16", "e" * 64, 1, 300, (shard,)).write(directory)
    return directory


def test_neither_password_nor_request_follows_a_redirect(corpus, tmp_path, monkeypatch):
    with FileServer(corpus) as other, FileServer(corpus) as server:
        host = server.url.removeprefix("http://")
        monkeypatch.setenv("STORE_PASSWORD", f"secret@{host}")
        server.redirect = other.url
        url = server.url.replace("//", "//me:env:STORE_PASSWORD@")
        with pytest.raises(NotFetchedError, match=other.url):
            fetch_manifest(store_at(url, QUICK), tmp_path)
    assert set(server.seen) == {"Basic bWU6c2VjcmV0"}
    assert other.seen == []


@pytest.mark.parametrize("value", ["secret", "secret@elsewhere", "@{host}", ""])
def test_a_variable_is_sent_only_to_the_host_that_it_names(corpus, tmp_path, monkeypatch, value):
    """Settings of others, such as those of their runs, choose the host and the variable."""
    with FileServer(corpus) as server:
        host = server.url.removeprefix("http://")
        monkeypatch.setenv("SOME_KEY", value.format(host=host))
        with pytest.raises(DataError, match="SOME_KEY") as error:
            fetch_manifest(store_at(f"http://me:env:SOME_KEY@{host}", QUICK), tmp_path)
    assert "secret" not in str(error.value)
    assert server.seen == []


@pytest.mark.parametrize("target", ["file:///etc/passwd?", "ftp://127.0.0.1", "http:///x"])
def test_a_redirect_that_leaves_the_web_is_refused_in_one_line(corpus, tmp_path, target):
    with FileServer(corpus) as server:
        server.redirect = target
        with pytest.raises(NotFetchedError) as error:
            fetch_manifest(store_at(server.url, QUICK), tmp_path)
    assert "\n" not in str(error.value)
    assert not list(tmp_path.glob("**/manifest.json"))


@pytest.mark.parametrize(
    ("before", "after", "is_refused"),
    [
        ("https://8.8.8.8/a", "https://8.8.8.8/b?sig=1", False),
        ("http://Host:80/a", "https://host:80/a", False),
        ("https://8.8.8.8/a", "http://8.8.8.8/a", True),
        ("https://8.8.8.8/a", "https://9.9.9.9/a", True),
        ("http://127.0.0.1:1/a", "http://127.0.0.1:2/b", True),
        ("http://10.0.0.1/a", "http://169.254.169.254/latest", True),
        ("http://8.8.8.8/a", "http://8.8.8.8@10.0.0.1/a", True),
        ("http://8.8.8.8/a", "file:///etc/passwd", True),
        ("http://8.8.8.8/a", "file://8.8.8.8/etc/passwd", True),
    ],
)
def test_a_redirect_stays_at_its_host_and_keeps_its_protection(before, after, is_refused):
    assert (redirect_problem(before, after) is not None) == is_refused


@pytest.mark.parametrize("length", ["\u00b2", "9" * 5000, "-1", " 1 2"])
def test_a_content_length_that_is_no_number_counts_for_nothing(corpus, tmp_path, length):
    with FileServer(corpus) as server:
        server.length = length
        assert fetch_manifest(store_at(server.url, QUICK), tmp_path).documents
