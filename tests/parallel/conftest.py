"""A small job, and a cache of tokenizer and corpus for the session."""

import os

import jobs
import pytest

from depthjax.data import default_corpus


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cache")
    os.environ["DEPTHJAX_CACHE"] = str(folder)
    default_corpus("bpe8k")
    return folder


@pytest.fixture(scope="session")
def config_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("config") / "small.py"
    path.write_text(jobs.CONFIG)
    return path
