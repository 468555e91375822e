"""What a run is made of, as frozen dataclasses; their JSON form; and the checks that need no
device.

A config file is a Python module with a function `config() -> Config`. Arguments of that function
called `shape` and `residual` are dials: `--model.shape` and `--model.residual` are handed to it, so
that the recipe can follow them. The command line overrides any field after that.
"""

from depthjax.config.build import build_model
from depthjax.config.fields import (
    Config,
    DataConfig,
    MeshConfig,
    ModelConfig,
    RunConfig,
    TrainConfig,
)
from depthjax.config.files import (
    OWN_VARIANT,
    flatten,
    from_dict,
    from_json,
    import_file,
    load_config,
    residual_named,
    to_dict,
    variant_source,
    with_dials,
)

__all__ = [
    "OWN_VARIANT",
    "Config",
    "DataConfig",
    "MeshConfig",
    "ModelConfig",
    "RunConfig",
    "TrainConfig",
    "build_model",
    "flatten",
    "from_dict",
    "from_json",
    "import_file",
    "load_config",
    "residual_named",
    "to_dict",
    "variant_source",
    "with_dials",
]
