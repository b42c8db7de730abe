"""ROSE's container image without a registry or an image builder: two layers and a list of them.

The base layer holds Python, busybox, the system libraries they need and the installed packages of
the extras that run in the cluster (no torch); it is made once per set of versions. The code layer
holds ROSE itself, taken from the checkout, so a changed line is in the cluster seconds later.

In the image ``/opt/rose`` is the virtual environment, ``/opt/rose/packages`` ROSE's own packages
and nothing else: a rollout engine that brings its own Python gets just that folder on its path.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import io
import json
import os
import platform
import re
import shutil
import sys
import sysconfig
import tarfile
import tempfile
import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path

from packaging.requirements import Requirement

from rose_dev.cluster.parts import cache_root
from rose_dev.errors import NotSupported
from rose_dev.shell import locked, run

IMAGE = "localhost/rose:dev"
EXTRAS = ("operator", "agent", "router", "weights")
DEMO = "dev/rose_demo"
"""Not in the wheel; a pod of the demo receives its spans."""
PREFIX = "opt/rose"
_VERSION = f"python{sys.version_info.major}.{sys.version_info.minor}"
_SITE = f"{PREFIX}/lib/{_VERSION}/site-packages"
_SKIPPED = {"__pycache__", "test", "tests", "idlelib", "ensurepip", "site-packages", "turtledemo"}
_SKIPPED |= {"tkinter", "lib2to3", "dist-packages"}
_LINKS = tuple(
    word
    for line in (
        "sh ls cat ps sleep env mkdir rm touch id kill nslookup mount umount df grep tail head dd",
        "date hostname ip chmod chown ln cp mv test true false nc netstat uname stat find sed awk",
        "xargs tr wc sort sync echo",
    )
    for word in line.split()
)
# Of the machine, for hosts of sandboxes; the shell's commands above are busybox's.
_PROGRAMS = ("tar", "nsenter", "mount", "umount", "ip", "unshare", "gzip")
_PROGRAM_FOLDER = "usr/local/sbin"
_FOREIGN_LIBRARIES = ("libseccomp.so.2", "libelf.so.1", "libz.so.1")
"""What runc and the inspector's library need, which come from a folder of the node."""
_LIBRARY = re.compile(r"(?:=> )?(/\S+) \(0x")

Log = Callable[[str], None]


def checkout() -> Path:
    """The checkout this package is installed from.

    Raises:
        NotSupported: it is installed from a wheel.
    """
    root = Path(__file__).resolve().parents[2]
    if not (root / "pyproject.toml").exists():
        message = f"{root} is no checkout of ROSE; images are built from a checkout"
        raise NotSupported(message)
    return root


def distributions(name: str, extras: tuple[str, ...]) -> dict[str, importlib.metadata.Distribution]:
    """Installed distributions that ``name[extras]`` needs, itself excluded, by name."""
    found: dict[str, importlib.metadata.Distribution] = {}
    seen: set[tuple[str, tuple[str, ...]]] = set()

    def visit(name: str, extras: tuple[str, ...]) -> None:
        if (name, extras) in seen:
            return
        seen.add((name, extras))
        distribution = importlib.metadata.distribution(name)
        found[name] = distribution
        for line in distribution.requires or []:
            wanted = Requirement(line)
            choices = extras or ("",)
            if wanted.marker is None or any(
                wanted.marker.evaluate({"extra": extra}) for extra in choices
            ):
                visit(wanted.name.lower(), tuple(sorted(wanted.extras)))

    visit(name, extras)
    del found[name]
    return found


def archive(log: Log = print) -> Path:
    """ROSE's image as a docker archive, up to date with the checkout.

    Raises:
        CommandFailed: a tool failed.
        NotSupported: ROSE is not installed from a checkout, or busybox is missing.
    """
    folder = cache_root() / "images"
    with locked(folder / "lock"):  # two nodes may start at once
        return _archive(folder, log)


def _archive(folder: Path, log: Log) -> Path:
    needed = distributions("rose-gpu", EXTRAS)
    versions = sorted(f"{name} {found.version}" for name, found in needed.items())
    key = _digest(repr([sys.version, sys.base_prefix, versions, _LINKS, _recipe()]))
    base = folder / f"base-{key}.tar"
    if not base.exists():
        _forget(folder, "base-*.tar", keep=1)
        log("[cluster] making the image's base layer (once per set of versions)")
        _write_layer(base, lambda root: _fill_base(root, needed.values()))
    sources = [*code_files(checkout(), DEMO), *kernel_programs()]
    code = folder / f"code-{key}-{_digest_files(sources)}.tar"
    if not code.exists():
        _forget(folder, "code-*.tar", keep=4)
        _write_layer(code, lambda root: _fill_code(root, sources))
    image = folder / f"rose-{code.stem}.tar"
    if not image.exists():
        _forget(folder, "rose-*.tar", keep=1)
        path = f"PATH=/{PREFIX}/bin:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
        config = {"Env": [path, "PYTHONUNBUFFERED=1"], "Entrypoint": [f"/{PREFIX}/bin/rose"]}
        write_archive(image, IMAGE, [base, code], config)
    return image


def pause_archive(name: str) -> Path:
    """The image that holds a pod's namespaces: busybox, asleep."""
    folder = cache_root() / "images"
    folder.mkdir(parents=True, exist_ok=True)
    image = folder / "pause.tar"
    if not image.exists():
        layer = folder / "pause-layer.tar"
        _write_layer(layer, lambda root: _copy(_busybox(), root / "bin/busybox"))
        write_archive(image, name, [layer], {"Entrypoint": ["/bin/busybox", "sleep", "2147483647"]})
    return image


def write_archive(
    target: Path, name: str, layers: list[Path], config: dict[str, list[str]]
) -> None:
    """Write a docker archive of uncompressed layers under an image name."""
    digests = [_digest_file(layer) for layer in layers]
    machine = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
    described = json.dumps(
        {
            "architecture": machine,
            "os": "linux",
            "config": config,
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}" for digest in digests]},
            "history": [{"created_by": "rose dev"} for _ in digests],
        }
    ).encode()
    config_name = hashlib.sha256(described).hexdigest() + ".json"
    names = [f"{digest}.tar" for digest in digests]
    manifest = [{"Config": config_name, "RepoTags": [name], "Layers": names}]
    scratch = target.with_suffix(f".{os.getpid()}")
    with tarfile.open(scratch, "w") as out:
        for entry, content in (
            (config_name, described),
            ("manifest.json", json.dumps(manifest).encode()),
        ):
            info = tarfile.TarInfo(entry)
            info.size = len(content)
            out.addfile(info, io.BytesIO(content))
        for entry, layer in zip(names, layers, strict=True):
            out.add(layer, arcname=entry)
    scratch.replace(target)


def code_files(root: Path, *more: str) -> list[tuple[Path, str]]:
    """Files of the wheel as (source, path below ``/opt/rose/packages``), from pyproject's list.

    Args:
        root: the checkout.
        more: packages that the wheel lacks, as paths in the checkout.
    """
    project = tomllib.loads((root / "pyproject.toml").read_text())
    packages = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    return [
        (path, str(path.relative_to((root / package).parent)))
        for package in (*packages, *more)
        for path in sorted((root / package).rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    ]


def kernel_programs() -> list[tuple[Path, str]]:
    """What ``make tap`` has compiled, as ``code_files``: beside the packages, not among them."""
    found = sorted((Path(sys.prefix) / "bpf").glob("*"))
    return [(path, f"../bpf/{path.name}") for path in found]


def _write_layer(target: Path, fill: Callable[[Path], None]) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".layer-") as scratch:
        root = Path(scratch) / "root"
        root.mkdir()
        fill(root)
        made = Path(scratch) / "layer.tar"
        with tarfile.open(made, "w") as out:
            for entry in sorted(root.iterdir()):
                out.add(entry, arcname=entry.name, filter=_owned_by_root)
        made.replace(target)


def _owned_by_root(info: tarfile.TarInfo) -> tarfile.TarInfo:
    info.uid = info.gid = 0
    info.uname = info.gname = ""
    if info.isdir():
        info.mode = 0o1777 if info.name == "tmp" else 0o755
    return info


def _fill_base(root: Path, needed: Iterable[importlib.metadata.Distribution]) -> None:
    _python(root)
    for distribution in needed:
        _install(distribution, root / _SITE)
    for name in _PROGRAMS:
        if (program := shutil.which(name)) is not None:
            _copy(Path(program).resolve(), root / _PROGRAM_FOLDER / name)
    _system_libraries(root)
    _copy(_busybox(), root / "bin/busybox")
    for link in _LINKS:
        (root / "bin" / link).symlink_to("busybox")
    texts = {
        "etc/passwd": "root:x:0:0:root:/root:/bin/sh\nrose:x:65532:65532:rose:/tmp:/bin/sh\n",
        "etc/group": "root:x:0:\nrose:x:65532:\n",
        "etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
        f"{PREFIX}/pyvenv.cfg": f"home = {Path(sys.base_prefix) / 'bin'}\n"
        "include-system-site-packages = false\n",
        f"{_SITE}/rose.pth": f"/{PREFIX}/packages\n",
    }
    for name, text in texts.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    for name in ("tmp", "proc", "sys", "dev", "run", "root", "var", "usr/bin"):
        (root / name).mkdir(parents=True, exist_ok=True)
    _compile(root / PREFIX)


def _install(distribution: importlib.metadata.Distribution, site: Path) -> None:
    """Copy its files, without its tests and without programs, which lie outside of the site."""
    for file in distribution.files or []:
        if not _SKIPPED.intersection(file.parts) and ".." not in file.parts:
            _copy(Path(str(distribution.locate_file(file))), site / str(file))


def _python(root: Path) -> None:
    """The interpreter at the very path it has here: engines mounted from the machine use it too."""
    executable = Path(sys.executable).resolve()
    home = Path(sys.base_prefix) / "bin" / _VERSION
    _copy(executable, root / str(home).lstrip("/"))
    library = Path(sysconfig.get_path("stdlib"))
    shutil.copytree(
        library,
        root / str(library).lstrip("/"),
        symlinks=True,
        ignore=lambda _folder, names: [
            name
            for name in names
            if name in _SKIPPED - {"__pycache__"} or name.endswith(".a") or "_tkinter" in name
        ],
        dirs_exist_ok=True,
    )
    binaries = root / PREFIX / "bin"
    binaries.mkdir(parents=True)
    for name in ("python", "python3", _VERSION):
        (binaries / name).symlink_to(home)


def _system_libraries(root: Path) -> None:
    """What the dynamic linker would load for Python and every extension module in the image."""
    objects = [path for path in root.rglob("*.so*") if path.is_file()]
    objects.append(Path(sys.executable).resolve())
    objects += (root / _PROGRAM_FOLDER).iterdir()
    answer = run(["ldd", *objects], seconds=120, check=False).stdout
    found = set(_LIBRARY.findall(answer))
    for name in (*_FOREIGN_LIBRARIES, "libnss_files.so.2", "libnss_dns.so.2", "libresolv.so.2"):
        found.update(str(path) for path in Path("/lib").glob(f"*/{name}"))
    for library in found:
        if not library.startswith(str(root)):
            _copy(Path(library).resolve(), root / library.lstrip("/"))
    bundle = Path("/etc/ssl/certs/ca-certificates.crt")
    if bundle.exists():
        _copy(bundle, root / str(bundle).lstrip("/"))


def _fill_code(root: Path, sources: list[tuple[Path, str]]) -> None:
    packages = root / PREFIX / "packages"
    for source, name in sources:
        _copy(source, packages / name)
    own = importlib.metadata.distribution("rose-gpu")
    information = packages / f"rose_gpu-{own.version}.dist-info"
    information.mkdir(parents=True)
    for name in ("METADATA", "entry_points.txt"):
        (information / name).write_text(own.read_text(name) or "")
    for name in ("rose", "kubectl-rose"):
        script = root / PREFIX / "bin" / name
        script.parent.mkdir(parents=True, exist_ok=True)
        script.write_text(
            f"#!/{PREFIX}/bin/python\nimport sys\n\nfrom rose_cli.main import main\n\n"
            "sys.exit(main())\n"
        )
        script.chmod(0o755)
    _compile(packages)


def _compile(folder: Path) -> None:
    """Byte code beside the sources: the image is read-only, and starts would be slow without."""
    prefix = str(folder.parents[1])
    command = [sys.executable, "-m", "compileall", "-q", "-j0", "-s", prefix, str(folder)]
    run(command, seconds=300, check=False)


def _busybox() -> Path:
    found = shutil.which("busybox")
    if found is None:
        message = "busybox is missing; on Debian: apt-get install busybox-static"
        raise NotSupported(message)
    return Path(found).resolve()


def _copy(source: Path, target: Path) -> None:
    if source.exists() and not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target)


def _recipe() -> str:
    return Path(__file__).read_text()


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _digest_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest_files(files: list[tuple[Path, str]]) -> str:
    return _digest(
        repr([(name, hashlib.sha256(path.read_bytes()).hexdigest()) for path, name in files])
    )


def _forget(folder: Path, pattern: str, *, keep: int) -> None:
    by_age = sorted(folder.glob(pattern), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in by_age[keep:]:
        path.unlink(missing_ok=True)
