"""Configs with fields of their parts replaced."""

import dataclasses

from depthjax.config import Config


def change(config: Config, **parts) -> Config:
    """`change(config, train={"steps": 3})`: the config with fields of its parts replaced."""
    made = {n: dataclasses.replace(getattr(config, n), **fields) for n, fields in parts.items()}
    return dataclasses.replace(config, **made)
