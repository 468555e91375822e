"""Where the tests keep what they prepare once."""

import os

import pytest


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory):
    """One cache for the session, unless another room's tests have set one already."""
    os.environ.setdefault("DEPTHJAX_CACHE", str(tmp_path_factory.mktemp("cache")))
