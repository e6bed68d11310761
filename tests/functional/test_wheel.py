"""What a wheel of the package and a container image contain."""

import subprocess
import sys
import zipfile
from pathlib import Path

from tests.helpers.commands import REPOSITORY_ROOT, tracked_files


def test_a_wheel_contains_the_packages_and_nothing_else(tmp_path: Path) -> None:
    tracked = tracked_files()
    for name in tracked:
        copy = tmp_path / "source" / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes((REPOSITORY_ROOT / name).read_bytes())
    # Without --wheel, the wheel is made from the source distribution, so both must be complete.
    subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", tmp_path],
        cwd=tmp_path / "source",
        capture_output=True,
        check=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        found = {name for name in archive.namelist() if ".dist-info/" not in name}
    packages = ("megatron_ladder/", "tools/ladder_lab/")
    assert found == {name.removeprefix("tools/") for name in tracked if name.startswith(packages)}


def test_the_container_image_copies_what_the_package_needs() -> None:
    copied = set[str]()
    for line in (REPOSITORY_ROOT / "examples" / "Dockerfile").read_text().splitlines():
        if line.startswith("COPY "):
            copied.update(line.split()[1:-1])
    present = {name.partition("/")[0] for name in tracked_files()}
    assert copied <= present
    assert present - copied == {".ci", ".gitignore", "docs", "tests", "vllm_plugin"}
