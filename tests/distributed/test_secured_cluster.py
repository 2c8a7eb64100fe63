"""A coordinator, a task server and a worker at an address of this machine that other hosts could reach."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from dflow.__main__ import main
from dflow.distributed.coordinator.coordinator import LISTENING
from tests.distributed.processes import Spawned
from tests.distributed.transports import own_address

pytestmark = pytest.mark.once

#: Connects once with each of several environments. All but the last are refused.
CONNECT = """
import json, os, sys
import dflow

address, *environments = sys.argv[1:]
for environment in environments:
    os.environ.update(json.loads(environment))
    try:
        cluster = dflow.connect(address, index=0)
    except dflow.DflowError as error:
        print(error)
"""
TRAIN = """
import jax.numpy as jnp

with cluster.parameter_servers():
    w = dflow.Variable(lambda: jnp.zeros(3), name="w")


@dflow.jit
def step(x):
    return w.assign_add(x)


for _ in range(3):
    step(jnp.ones(3))
print("w is", w.read().tolist())
cluster.close()
"""


class Secured:
    """A coordinator and a ps task, with the proofs that they and the worker authenticate themselves with."""

    def __init__(self, folder: Path, kind: str, started: ExitStack) -> None:
        self.folder, self.kind = folder, kind
        (folder / "worker.py").write_text(CONNECT + TRAIN)
        self._make_files()
        host = own_address()
        words = f"-m dflow coordinator --job ps=1 --job worker=1 --address {host}:0".split()
        coordinator = started.enter_context(Spawned(*words, *self.flags("coordinator"), cwd=folder))
        self.address = coordinator.read_until(LISTENING)[0].removeprefix(LISTENING).strip()
        assert self.address.startswith(host)
        words = ("task", "--index", "0", "--coordinator", self.address, *self.flags("ps-0"))
        self.task = started.enter_context(Spawned("-m", "dflow", *words, cwd=folder, JAX_PLATFORMS="cpu"))

    def _make_files(self) -> None:
        if self.kind == "secret":
            main(["certs", "secret", str(self.folder / "secret")])
            return
        main(["certs", "init", str(self.folder)])
        for name in ("coordinator", "ps:0", "worker:0"):
            main(["certs", "issue", str(self.folder), "--name", name, "--host", own_address()])

    def flags(self, who: str) -> tuple[str, str]:
        if self.kind == "secret":
            return "--secret-file", str(self.folder / "secret")
        return "--certificates", str(self.folder / who)

    def environment(self, who: str) -> dict[str, str]:
        if self.kind == "secret":
            return {"DFLOW_SECRET_FILE": str(self.folder / "secret")}
        files = {"DFLOW_TLS_CERT": "cert.pem", "DFLOW_TLS_KEY": "key.pem", "DFLOW_TLS_CA": "ca.pem"}
        return {name: str(self.folder / who / file) for name, file in files.items()}

    def work(self, *environments: dict[str, str]) -> str:
        """Run the worker, which tries these environments in order; return its output."""
        tried = map(json.dumps, environments)
        with Spawned("worker.py", self.address, *tried, cwd=self.folder, JAX_PLATFORMS="cpu") as worker:
            status, output = worker.finish()
        assert status == 0, output
        return output


@pytest.fixture(params=["certificates", "secret"])
def secured(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Secured]:
    with ExitStack() as started:
        yield Secured(tmp_path, request.param, started)


def test_a_step_runs_among_those_who_know_each_other_and_no_one_else_takes_part(secured: Secured) -> None:
    of_another = [secured.environment("ps-0")] if secured.kind == "certificates" else []
    output = secured.work({}, *of_another, secured.environment("worker-0"))
    assert output.count("is not a loopback address, and no certificates or secret are configured") == 1
    refused = "calls itself '/job:worker/task:0', but its certificate is for ps:0; issue one for that name"
    assert output.count(refused) == len(of_another)
    assert output.endswith("\nw is [3.0, 3.0, 3.0]\n")


@pytest.mark.parametrize("kind", ["certificates", "secret"])
def test_a_launch_with_a_proof_gives_it_to_all_its_tasks(tmp_path: Path, kind: str) -> None:
    connect = "import dflow\ncluster = dflow.connect()\n"
    (tmp_path / "script.py").write_text(connect + TRAIN + 'print("at", cluster.server.address)\n')
    if kind == "secret":
        main(["certs", "secret", str(tmp_path / "secret")])
        flags = ("--secret-file", "secret")
    else:
        main(["certs", "init", str(tmp_path)])
        names = [word for name in ("launcher", "coordinator", "ps", "worker") for word in ("--name", name)]
        main(["certs", "issue", str(tmp_path), *names, "--host", own_address()])
        flags = ("--certificates", "launcher-coordinator-ps-worker")
    where = ("--env", f"DFLOW_ADDRESS={own_address()}")
    with Spawned("-m", "dflow", "launch", *flags, *where, "script.py", cwd=tmp_path, JAX_PLATFORMS="cpu") as launched:
        status, output = launched.finish()
    assert status == 0, output
    assert "w is [3.0, 3.0, 3.0]" in output
    assert f"at {own_address()}:" in output
