"""A small Block AttnRes model on the embedded corpus: minutes on a laptop's CPU, seconds on a GPU.

    depthjax train configs/quickstart.py

1 MB of US presidential messages, an 8192-id tokenizer trained at first use, 8 layers of width 128.
The held-out loss ends below that of a unigram model, which the same command computes and prints.
Try another residual connection or length: --model.residual pre_ln --train.steps 1000
"""

from depthjax.config import Config, DataConfig, ModelConfig, RunConfig, TrainConfig
from depthjax.residuals import BlockAttnRes


def config() -> Config:
    return Config(
        model=ModelConfig(
            shape="tiny-L8",
            residual=BlockAttnRes(),
            context=128,
            dtype="float32",
            remat="layer",  # on a CPU, moving activations costs more than computing them again
        ),
        data=DataConfig(tokenizer="bpe8k"),
        train=TrainConfig(steps=200, batch=16, peak_lr=4e-3),
        run=RunConfig(dir="runs/quickstart", save_every=50, eval_every=50, depth_sizes=True),
    )
