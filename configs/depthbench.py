"""The DepthBench study: any of its shapes under any residual connection, with the paper's recipe.

    depthjax data prepare --out data/fineweb-edu \\
        hf://datasets/HuggingFaceFW/fineweb-edu/sample/100BT
    depthjax train configs/depthbench.py --model.shape 400m-L32 --model.residual block_attnres

The two dials set everything else. DepthBench, section 2: 512 x 2048 tokens a step, AdamW
(0.9, 0.95), decay 0.1, clip 1.0, warmup over a tenth of the steps, cosine to a tenth of the peak.

Two things differ from the authors by default, for the better: parameters are kept in fp32, and
norms and depth queries are not decayed. To do as they did:

    --model.param_dtype bfloat16 --train.decay_vectors true
"""

from depthjax.config import Config, DataConfig, ModelConfig, RunConfig, TrainConfig, residual_named
from depthjax.errors import InputError
from depthjax.residuals import BlockAttnRes, FullAttnRes

# Steps by family of shapes: 4, 6, 8, 10 and 32 billion tokens.
STEPS = {"200m": 3800, "300m": 5700, "400m": 7600, "500m": 9500, "1.6b": 30400}
STEPS["backbone-300m"] = STEPS["400m"]

# Where a variant is not simply its defaults: the authors' mixing kernels use eps 1e-5.
VARIANTS = {
    "full_attnres": FullAttnRes(mix_eps=1e-5),
    "block_attnres": BlockAttnRes(mix_eps=1e-5),
}


def config(shape: str = "400m-L32", residual: str = "pre_ln") -> Config:
    family = shape.rpartition("-L")[0]
    if family not in STEPS:
        raise InputError(f"model.shape is {shape!r}: this study has {', '.join(STEPS)} shapes")
    return Config(
        model=ModelConfig(
            shape=shape,
            residual=VARIANTS.get(residual) or residual_named(residual),
            context=2048,
            remat="layer",
        ),
        data=DataConfig(dir="data/fineweb-edu", tokenizer="neox"),
        train=TrainConfig(
            steps=STEPS[family],
            batch=512,
            accumulate=4,
            peak_lr=5e-4 if family == "1.6b" else None,  # None: the variant's own
        ),
        run=RunConfig(dir=f"runs/{shape}-{residual}", save_every=500, eval_every=1000),
    )
