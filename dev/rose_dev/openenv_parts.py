"""What the tests of OpenEnv's provider run on: ``python -m rose_dev.openenv_parts``, as root.

Into ``$ROSE_CACHE/openenv``, once, all of the versions in ``openenv_constraints.txt``:

| what | for |
|---|---|
| ``venv`` | OpenEnv's own client, with what ROSE's provider needs |
| ``parts`` | a host's folder (``ROSE_SANDBOX_PARTS``) with one more image |

The image ``openenv`` is ``base`` with ``/app/.venv``, as OpenEnv's Dockerfiles leave it, for the
image's own Python. Files of ``base`` are links and no copies.
Next step: ``tests/sandbox/test_openenv.py``.
"""

from __future__ import annotations

import hashlib
import shutil
import sys
from pathlib import Path

import rose_dev
from rose_dev.environments import cache_folder, find_uv, log
from rose_dev.sandbox_parts import Impossible, run

VERSION = "0.10.0"
CONSTRAINTS = Path(rose_dev.__file__).with_name("openenv_constraints.txt")


def install(cache: Path) -> Path:
    """Make both; returns their folder.

    Raises:
        Impossible: there is no image ``base``, or a package cannot be had.
    """
    folder, sandbox = cache / "openenv", cache / "sandbox"
    base = sandbox / "images" / "base"
    python = next(base.glob("usr/bin/python3.[0-9]*"), None)
    if python is None:
        raise Impossible(f"{base} is not there or has no Python; make sandbox")
    made_of = (CONSTRAINTS, sandbox / ".image", Path(__file__))
    wanted = hashlib.sha256(b"\0".join(path.read_bytes() for path in made_of)).hexdigest()
    stamp = folder / ".made-of"
    if not stamp.exists() or stamp.read_text() != wanted:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        _client(str(find_uv(cache)), folder / "venv")
        _image(str(find_uv(cache)), base, python.name, folder / "parts" / "images" / "openenv")
        for name in ("bin", "bpf"):
            (folder / "parts" / name).symlink_to(sandbox / name)
        stamp.write_text(wanted)
    return folder


def _client(uv: str, folder: Path) -> None:
    log(f"OpenEnv {VERSION}: its client (480 MB)")
    run([uv, "venv", "--quiet", "-p", "3.11", str(folder)])
    python = str(folder / "bin" / "python")
    run([uv, "pip", "install", "--quiet", "-p", python, "-r", str(CONSTRAINTS)])


def _image(uv: str, base: Path, python: str, image: Path) -> None:
    log(f"OpenEnv {VERSION}: an image with its server (320 MB)")
    image.parent.mkdir(parents=True)
    run(["cp", "-al", str(base), str(image)])
    venv = image / "app" / ".venv"
    (venv / "bin").mkdir(parents=True)
    for name in ("python", "python3"):
        (venv / "bin" / name).symlink_to(f"/usr/bin/{python}")
    (venv / "pyvenv.cfg").write_text("home = /usr/bin\ninclude-system-site-packages = false\n")
    version = python.removeprefix("python")
    wanted = ("-c", str(CONSTRAINTS), f"openenv=={VERSION}", "--no-build")
    platform = ("--python-version", version, "--python-platform", "x86_64-manylinux_2_28")
    target = venv / "lib" / python / "site-packages"
    run([uv, "pip", "install", "--quiet", *wanted, *platform, "--target", str(target)])
    # What is not compiled here is compiled anew in every sandbox. Some files are no Python.
    compiled = f"import compileall; compileall.compile_dir('/app/.venv/lib/{python}', quiet=2)"
    run(["chroot", str(image), "/app/.venv/bin/python", "-c", compiled])


if __name__ == "__main__":
    try:
        print(install(cache_folder()))
    except Impossible as error:  # whoever asks for these tests is not content with their skips
        sys.exit(f"OpenEnv: {error}")
