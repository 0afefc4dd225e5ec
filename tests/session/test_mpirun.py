"""Ranks that a test starts with mpirun on this host, with the stand-in for a GPU."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.support.verified import VerifiedProject

# Ranks of one program use different code, as ranks of a pipeline do.
RANK = """
import os, sys
from standin_gpu import launch, trace_program, use

detector = trace_program()
rank = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"])
use(sys.argv[1], rank)
launch(("vector_add", "_ZN8matrices8multiplyILi16EEEvPKfS2_Pfiii")[rank])
detector.stop()
"""
SUITE = """
def test_ranks():
    command = ["mpirun", "-n", "2", sys.executable, "rank.py", str(LIB)]
    subprocess.run(command, check=True)
"""
# Open MPI refuses root, and more ranks than cores, unless it is told otherwise.
ENVIRON = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "PRTE_ALLOW_RUN_AS_ROOT": "1",
    "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="needs mpirun")
def test_each_rank_is_a_process_of_the_run(tmp_path: Path) -> None:
    project = VerifiedProject(tmp_path / "project", SUITE)
    project.environ |= ENVIRON
    project.write("rank.py", RANK)
    project.trace("--negativa-level=launch")

    usage = project.latest("usage.json")
    assert [process["header"]["role"] for process in usage["processes"]].count("child") == 2
    [row] = json.loads(project.negativa("tests", "--json").stdout)["rows"]
    assert (row["test"], row["kernels"], row["launches"]) == ("test_a.py::test_ranks", 2, 2)
    assert "\nPROVED" in project.verify()
