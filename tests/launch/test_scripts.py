"""The launch scripts: what each would run, by --dry-run, and that schedulers can read it."""

import json
import os
import pathlib
import shlex
import shutil
import subprocess
import sys
import time

import pytest
import yaml

LAUNCH = pathlib.Path(__file__).parent.parent.parent / "launch"
SCRIPTS = sorted(path for path in LAUNCH.rglob("*") if path.suffix in (".sh", ".sbatch"))
CONFIG = ["configs/depthbench.py", "--model.shape", "400m-L32", "--train.steps", "3"]
TRAIN = ["python", "-m", "depthjax", "train", CONFIG[0], "--run.dir", "/shared/runs/a b"]
TRAIN += CONFIG[1:]

GKE = {"NAME": "mine", "IMAGE": "r-docker.pkg.dev/p/r/i@sha256:12", "CLAIM": "c", "HOSTS": "16"}
TPU = {**GKE, "ACCELERATOR": "tpu-v5p-slice", "TOPOLOGY": "4x4x4", "SLICES": "2"}
GPU = {**GKE, "ACCELERATOR": "nvidia-h100-80gb", "DEVICE": "gpu"}
XPK = {"CLUSTER": "pods", **GKE}
GCE = {**GKE, "ZONE": "us-east5-b", "PROJECT": "p", "BUCKET": "b"}
MIG = {**GCE, "MACHINE": "ct6e-standard-4t", "TOPOLOGY": "4x4", "IMAGE_FAMILY": "f"}
QUEUED = {**GCE, "TYPE": "v4-32", "VERSION": "tpu-ubuntu2204-base"}


def script(name: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
    base = {"PATH": os.environ["PATH"], "RUN_DIR": "/shared/runs/a b"}
    command = ["bash", str(LAUNCH / name), *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, env={**base, **environment}, timeout=60
    )


def dry_run(name: str, **environment: str) -> str:
    done = script(name, "--dry-run", *CONFIG, **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def commands(text: str) -> list[list[str]]:
    return [shlex.split(line) for line in text.splitlines()]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda p: str(p.relative_to(LAUNCH)))
def test_shellcheck(path):
    program = shutil.which("shellcheck", path=f"{pathlib.Path(sys.executable).parent}:/usr/bin")
    assert program, 'pip install "depthjax[test]" brings shellcheck'
    done = subprocess.run([program, "-x", "-P", "SCRIPTDIR", path], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    if path.name not in ("common.sh", "metadata.sh"):  # which are sourced
        assert "\nset -euo pipefail\n" in path.read_text()
        assert os.access(path, os.X_OK)


def test_local_starts_each_process_with_its_place():
    lines = commands(dry_run("local.sh", PROCESSES="3", DEVICES="2", PORT="1234"))
    assert len(lines) == 3
    for index, line in enumerate(lines):
        assert line[0] == "env"
        assert line[-len(TRAIN) :] == TRAIN
        given = dict(word.split("=", 1) for word in line[1 : -len(TRAIN)])
        assert given["DEPTHJAX_PROCESSES"] == "3"
        assert given["DEPTHJAX_PROCESS_ID"] == str(index)
        assert given["JAX_COORDINATOR_ADDRESS"] == "127.0.0.1:1234"
        assert given["JAX_COMPILATION_CACHE_DIR"] == "/shared/runs/compile-cache"


@pytest.mark.parametrize("container", [None, "nvcr.io#nvidia/jax:26.10"])
def test_slurm_runs_the_command_as_a_step(container):
    extra = {} if container is None else {"CONTAINER": container, "MOUNTS": "/shared:/shared"}
    (line,) = commands(dry_run("slurm/train.sbatch", **extra))
    assert line[:2] == ["srun", "--kill-on-bad-exit=1"]
    assert line[-len(TRAIN) :] == TRAIN
    options = ["--container-image=nvcr.io#nvidia/jax:26.10", "--container-mounts=/shared:/shared"]
    assert line[2 : -len(TRAIN)] == ([] if container is None else options)


def test_slurm_arrays_take_a_line_each(tmp_path):
    file = tmp_path / "runs.txt"
    file.write_text("configs/quickstart.py\nconfigs/depthbench.py --train.steps 7\n")
    done = script(
        "slurm/train.sbatch", "--dry-run", ARRAY_CONFIGS=str(file), SLURM_ARRAY_TASK_ID="1"
    )
    (line,) = commands(done.stdout)
    expected = ["configs/depthbench.py", "--run.dir", "/shared/runs/a b/1", "--train.steps", "7"]
    assert line[-5:] == expected


def round_trip(manifest: dict) -> dict:
    """A manifest read and written again by JobSet's own types: what they do not know is lost."""
    from kubeflow_trainer_api.models import JobsetV1alpha2JobSet

    return JobsetV1alpha2JobSet.from_dict(manifest).to_dict()


@pytest.mark.parametrize(("environment", "processes"), [(TPU, 32), (GPU, 16)])
def test_jobset(environment, processes):
    import kubernetes_validate

    manifest = yaml.safe_load(dry_run("gke/jobset.sh", **environment))
    assert round_trip(manifest) == manifest
    (replicated,) = manifest["spec"]["replicatedJobs"]
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}}
    kubernetes_validate.validate(
        {**job, "spec": replicated["template"]["spec"]}, "1.31", strict=True
    )
    assert manifest["spec"]["failurePolicy"]["maxRestarts"] == 10
    spec = replicated["template"]["spec"]
    assert spec["parallelism"] == spec["completions"] == 16
    assert replicated["replicas"] * spec["completions"] == processes
    pod = spec["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] >= 120
    (container,) = pod["containers"]
    assert container["command"] == TRAIN
    given = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert given["DEPTHJAX_PROCESSES"] == str(processes)
    if environment is GPU:  # the first pod by JobSet's naming of hosts
        assert given["JAX_COORDINATOR_ADDRESS"] == "mine-workers-0-0.mine:8482"
        assert replicated["name"] == "workers"
        assert "DEPTHJAX_PROCESS_ID" in given


def test_a_mistyped_field_of_a_jobset_is_noticed():
    manifest = yaml.safe_load(dry_run("gke/jobset.sh", **TPU))
    manifest["spec"]["failurePolicy"]["maxRestart"] = 3
    assert round_trip(manifest) != manifest


@pytest.mark.parametrize(
    ("environment", "size"),
    [
        ({**XPK, "TPU": "v5p-128", "SLICES": "2"}, ["--tpu-type", "v5p-128", "--num-slices", "2"]),
        ({**XPK, "GPU": "h100-80gb-8"}, ["--device-type", "h100-80gb-8", "--num-nodes", "16"]),
    ],
)
def test_xpk(environment, size):
    (line,) = commands(dry_run("gke/xpk.sh", **environment))
    assert line[:3] == ["xpk", "workload", "create"]
    start = line.index(size[0])
    assert line[start : start + 4] == size
    inner = shlex.split(line[line.index("--command") + 1])
    assert inner[:2] == ["exec", "env"]
    assert inner[-len(TRAIN) :] == TRAIN
    processes = 16 * int(environment.get("SLICES", 1))
    assert f"DEPTHJAX_PROCESSES={processes}" in line


@pytest.mark.parametrize(
    ("name", "environment", "last"),
    [
        ("gce_tpu/mig.sh", MIG, "resource-policies"),
        ("gce_tpu/queued.sh", QUEUED, "tpus"),
    ],
)
def test_compute_engine_makes_and_removes(name, environment, last):
    """Whatever is created is deleted again."""
    lines = commands(dry_run(name, **environment))
    assert all(line[:2] == ["gcloud", "compute"] for line in lines)
    made = {tuple(line[2 : line.index("create")]) for line in lines if "create" in line}
    gone = {tuple(line[2 : line.index("delete")]) for line in lines if "delete" in line}
    assert made
    assert made == gone
    assert lines[-1][2] == last


@pytest.mark.parametrize(("name", "environment"), [("mig.sh", MIG), ("queued.sh", QUEUED)])
def test_compute_engine_leaves_what_is_there_already(tmp_path, name, environment):
    """A name that is taken is refused, and nothing of that name is deleted."""
    gcloud = tmp_path / "gcloud"
    gcloud.write_text(f'#!/usr/bin/env bash\necho "$@" >>{tmp_path}/asked\n')
    gcloud.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = script(f"gce_tpu/{name}", *CONFIG, **environment, PATH=path)
    assert done.returncode == 2
    assert "NAME is mine, and there is a" in done.stderr
    asked = (tmp_path / "asked").read_text()
    assert "describe" in asked
    assert "delete" not in asked
    assert "create" not in asked


@pytest.mark.parametrize("preempted", [False, True])
def test_compute_engine_hosts_run_the_command(tmp_path, preempted):
    """host.sh, with stand-ins for what a host has: its container gets command and environment, and
    its status is written, also where the host was told to stop."""
    tools = tmp_path / "tools"
    tools.mkdir()
    stop = f"touch {tools}/stopped; sleep 1"
    wait = f'kill -TERM "$PPID"; until [ -e {tools}/stopped ]; do sleep 0.05; done;'
    values = {"command": shlex.join(TRAIN), "image": "r/i", "bucket": "b", "mount": str(tmp_path)}
    values["environment"] = "DEPTHJAX_PROCESSES=4\nDEPTHJAX_STOP_STATUS=75"
    for name, value in values.items():
        (tools / f"value-{name}").write_text(value)
    for tool, body in {
        "curl": f'case "$*" in *PUT*) echo "$*" >{tools}/put;; '
        f'*) cat "{tools}/value-${{@: -1:1}}" 2>/dev/null || '
        f'cat "{tools}/value-$(sed s/.*depthjax-// <<<"${{@: -1}}")";; esac',
        "mountpoint": "exit 0",
        "gcloud": "exit 0",
        "docker": f'case "$1" in stop) {stop};; run) printf "%s\\n" "$@" >{tools}/words; '
        f"{wait if preempted else ''} exit 75;; esac",
    }.items():
        (tools / tool).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (tools / tool).chmod(0o755)
    done = script("gce_tpu/host.sh", PATH=f"{tools}:{os.environ['PATH']}")
    assert done.returncode == 75, done.stderr
    words = (tools / "words").read_text().splitlines()
    assert shlex.split(words[-1]) == ["exec", *TRAIN]
    assert "DEPTHJAX_PROCESSES=4" in words
    assert "DEPTHJAX_STOP_STATUS=75" in words
    assert "--data 75" in (tools / "put").read_text()


def test_sky_ends_in_the_same_command():
    task = yaml.safe_load((LAUNCH / "sky.yaml").read_text())
    assert 'python -m depthjax train "$CONFIG" --run.dir "$RUN_DIR" $OVERRIDES' in task["run"]
    for part in ("setup", "run"):
        subprocess.run(["bash", "-n"], input=task[part], text=True, check=True)


@pytest.mark.parametrize(
    ("name", "environment", "missing"),
    [
        ("local.sh", {"RUN_DIR": ""}, "RUN_DIR is not set"),
        ("gke/jobset.sh", {**TPU, "CLAIM": ""}, "CLAIM is not set"),
        ("gke/jobset.sh", {**TPU, "RUN_DIR": "/tmp/x"}, "give one below /shared"),
        ("gke/xpk.sh", XPK, "GPU is not set"),
        ("gce_tpu/mig.sh", {**MIG, "MACHINE": ""}, "MACHINE is not set"),
        ("slurm/train.sbatch", {"RUN_DIR": ""}, "RUN_DIR is not set"),
        ("slurm/train.sbatch", {"ARRAY_CONFIGS": "/none"}, "ARRAY_CONFIGS is '/none'"),
        ("aot_check.sh", {}, "give TOPOLOGY"),
    ],
)
def test_what_is_missing_is_said(name, environment, missing):
    done = script(name, "--dry-run", *CONFIG, **environment)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert missing in line
    assert done.stdout == ""


NUMBERS = [
    ("local.sh", {}, ["PROCESSES", "DEVICES", "PORT"]),
    ("gke/jobset.sh", TPU, ["HOSTS", "SLICES", "CHIPS"]),
    ("gke/xpk.sh", {**XPK, "TPU": "v5p-128"}, ["HOSTS", "SLICES"]),
    ("gce_tpu/mig.sh", MIG, ["HOSTS"]),
    ("gce_tpu/queued.sh", QUEUED, ["HOSTS"]),
]


@pytest.mark.parametrize(("name", "environment", "fields"), NUMBERS, ids=lambda x: str(x)[:12])
def test_bad_numbers_are_refused_before_anything_runs(name, environment, fields):
    bad = [(field, value, 1) for field in fields for value in ("abc", "-1", "0", "2.5", "08")]
    bad += [("MAX_RESTARTS", "abc", 0)] if name != "local.sh" else []
    for field, value, least in bad:
        done = script(name, "--dry-run", *CONFIG, **{**environment, field: value, "CHECK": "v5p:2"})
        (line,) = done.stderr.splitlines()
        assert line.startswith(f"{pathlib.Path(name).name}: {field} is '{value}': give ")
        assert line.endswith(f", {least} or more")
        assert (done.returncode, done.stdout) == (2, "")
    if name != "local.sh":
        dry_run(name, **{**environment, "MAX_RESTARTS": "0"})


def test_no_port_beyond_the_last():
    done = script("local.sh", "--dry-run", *CONFIG, PORT="65536")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.endswith("65535 or less\n")


def test_slurm_refuses_what_it_would_trip_over_when_training_is_done(tmp_path):
    done = script("slurm/train.sbatch", "--dry-run", *CONFIG, MAX_RESTARTS="-1")
    assert (done.returncode, done.stdout) == (2, "")
    assert "MAX_RESTARTS is '-1': give how often" in done.stderr
    file = tmp_path / "runs.txt"
    file.write_text("configs/quickstart.py\n")
    array = {"ARRAY_CONFIGS": str(file), "SLURM_ARRAY_TASK_ID": "1"}
    done = script("slurm/train.sbatch", "--dry-run", **array)
    assert (done.returncode, done.stdout) == (2, "")
    assert "which has no line for task 1" in done.stderr


@pytest.mark.parametrize(
    ("name", "environment"), [("gke/jobset.sh", GPU), ("gke/xpk.sh", {**XPK, "GPU": "h100"})]
)
def test_gpu_nodes_have_no_slices(name, environment):
    done = script(name, "--dry-run", *CONFIG, **environment, SLICES="2")
    assert (done.returncode, done.stdout) == (2, "")
    assert "SLICES is 2: GPU nodes have none, give HOSTS alone" in done.stderr


def test_a_manifest_is_alone_on_stdout():
    """The check beside it goes to stderr, so that the rest can go to kubectl."""
    done = script("gke/jobset.sh", "--dry-run", *CONFIG, **TPU, CHECK="v5p:4x4x4")
    assert "TOPOLOGY=v5p:4x4x4" in done.stderr
    assert done.stdout == dry_run("gke/jobset.sh", **TPU)


def stand_in(path: pathlib.Path, body: str) -> str:
    """A PYTHON that does something else for `-m depthjax`, and is Python otherwise."""
    path.write_text(
        f'#!/usr/bin/env bash\nif [ "$2" != depthjax ]; then exec {sys.executable} "$@"; fi\n{body}'
    )
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(("fits", "status"), [(True, 0), (False, 1)])
def test_the_check_before_a_run_fails_where_the_run_does_not_fit(tmp_path, fits, status):
    """By what `depthjax plan` writes; with CHECK the other scripts go no further."""
    figures = json.dumps({"entries": [{"fits": fits}]})
    python = stand_in(
        tmp_path / "python",
        f"""[ "$3" != train ] || {{ echo trained; exit; }}
while [ "$1" != --json ]; do shift; done; echo '{figures}' >"$2"
""",
    )
    assert script("aot_check.sh", *CONFIG, PYTHON=python, TOPOLOGY="v5p:2x2x1").returncode == status
    done = script("local.sh", *CONFIG, PYTHON=python, CHECK="v5p:2x2x1", PROCESSES="1")
    assert done.returncode == status
    assert ("trained" in done.stdout) == fits


def test_plan_says_whether_a_run_fits():
    """The name that aot_check.sh reads."""
    from depthjax.aot.entry import Entry

    assert "fits" in Entry.__dataclass_fields__


def test_local_ends_with_the_status_of_the_first_that_failed(tmp_path):
    python = stand_in(
        tmp_path / "python",
        'sleep "0.$((5 * DEPTHJAX_PROCESS_ID + 1))"; exit $((7 + DEPTHJAX_PROCESS_ID))\n',
    )
    done = script("local.sh", *CONFIG, PYTHON=python, PROCESSES="2")
    assert done.returncode == 7
    assert "process 0 of 2 ended with status 7, and the others end with it" in done.stderr
    python = stand_in(tmp_path / "good", "exit 0\n")
    assert script("local.sh", *CONFIG, PYTHON=python, PROCESSES="3").returncode == 0


@pytest.mark.parametrize(
    ("end", "status", "words"),
    [
        (
            "kill -KILL $$",
            137,
            "was killed (SIGKILL), and the others end with it; the same command",
        ),
        ("exit 2", 2, "did not start, and the others end with it: mend what it says"),
    ],
)
def test_local_says_which_process_ended_the_run_before_the_others_do(tmp_path, end, status, words):
    """With how to go on: by the same command only where the input was good."""
    wait = f"until grep -q '^local.sh' {tmp_path}/stderr; do sleep 0.1; done; echo lost >&2; exit 1"
    python = stand_in(tmp_path / "python", f"[ $DEPTHJAX_PROCESS_ID = 1 ] && {end}\n{wait}\n")
    environment = {**os.environ, "PYTHON": python, "RUN_DIR": "/tmp/x", "PROCESSES": "3"}
    with open(tmp_path / "stderr", "w") as stderr:
        command = ["bash", str(LAUNCH / "local.sh"), *CONFIG]
        done = subprocess.run(command, env=environment, stderr=stderr, timeout=60)
    assert done.returncode == status
    said = [line for line in (tmp_path / "stderr").read_text().splitlines() if "Killed" not in line]
    assert said[0].startswith(f"local.sh: process 1 of 3 {words}")
    assert said[1:] == ["lost", "lost"]


def test_local_hands_sigterm_on(tmp_path):
    python = stand_in(
        tmp_path / "python",
        f'trap "touch {tmp_path}/$DEPTHJAX_PROCESS_ID; exit 0" TERM; touch {tmp_path}/up; '
        "while true; do sleep 0.1; done\n",
    )
    environment = {**os.environ, "PYTHON": python, "RUN_DIR": "/tmp/x", "PROCESSES": "2"}
    process = subprocess.Popen(["bash", str(LAUNCH / "local.sh"), *CONFIG], env=environment)
    while not (tmp_path / "up").exists():
        time.sleep(0.05)
    time.sleep(1)
    process.terminate()
    assert process.wait(timeout=30) == 0
    assert (tmp_path / "0").exists()
    assert (tmp_path / "1").exists()
