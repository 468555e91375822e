"""What xpk and SkyPilot themselves make of our scripts. Their packages do not go together with
ours, so they are found on the path:

    python -m venv tools && tools/bin/pip install xpk skypilot
    PATH=$PWD/tools/bin:$PATH pytest -m proof tests/launch/test_tools.py
"""

import pathlib
import shlex
import shutil
import subprocess

import pytest
import yaml
from test_scripts import CONFIG, LAUNCH, XPK, commands, dry_run, round_trip

pytestmark = pytest.mark.proof


@pytest.mark.skipif(not shutil.which("xpk"), reason="xpk is not on the path")
@pytest.mark.parametrize(
    ("size", "processes"),
    [({"TPU": "v5p-128", "SLICES": "2"}, 32), ({"GPU": "h100-mega-80gb-8", "HOSTS": "4"}, 4)],
)
def test_xpk_renders_the_jobset(size, processes, tmp_path):
    """Our options are those of its parser, and its manifest holds our command and variables."""
    manifest = tmp_path / "jobset.yaml"
    (line,) = commands(dry_run("gke/xpk.sh", **{**XPK, **size}, MANIFEST=str(manifest)))
    nowhere = ["--dry-run", "--skip-validation", "--project", "p", "--zone", "us-east5-a"]
    done = subprocess.run([*line, *nowhere], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    jobset = yaml.safe_load(manifest.read_text())
    assert round_trip(jobset)["spec"]["failurePolicy"]["maxRestarts"] == 10
    (replicated,) = jobset["spec"]["replicatedJobs"]
    hosts = replicated["template"]["spec"]["completions"]
    assert replicated["replicas"] * hosts == processes
    pod = replicated["template"]["spec"]["template"]["spec"]
    container = pod["containers"][-1]
    given = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert given["DEPTHJAX_PROCESSES"] == str(processes)
    assert f"-m depthjax train {CONFIG[0]} --run.dir" in container["command"][-1]
    assert shlex.join(CONFIG[1:]) in container["command"][-1]
    assert pod["terminationGracePeriodSeconds"] == 300


CHECK_TASK = """
import sys, jsonschema, yaml
from sky.utils import schemas
task = yaml.safe_load(open(sys.argv[1]))
jsonschema.validate(task, schemas.get_task_schema())
jsonschema.validate(task["resources"], schemas.get_resources_schema())
"""


@pytest.mark.skipif(not shutil.which("sky"), reason="SkyPilot is not on the path")
def test_skypilot_knows_every_field_of_the_task(tmp_path):
    python = pathlib.Path(shutil.which("sky")).with_name("python")
    check = [python, "-c", CHECK_TASK]
    subprocess.run([*check, LAUNCH / "sky.yaml"], check=True)
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text((LAUNCH / "sky.yaml").read_text().replace("num_nodes:", "num_hosts:"))
    assert subprocess.run([*check, wrong], capture_output=True).returncode != 0
