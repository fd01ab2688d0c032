"""The environment and the fixtures of `tests/`, which is on the path of imports."""

from conftest import _empty_cache, pytest_configure, tiny_policy_dir  # noqa: F401
