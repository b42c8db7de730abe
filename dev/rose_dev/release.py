"""``make release``: chart and images into an OCI registry, signed, with SBOM and provenance.

| step | by |
|---|---|
| images of the Dockerfile's targets, with ``--build`` | docker, podman or buildah |
| the chart as an OCI artifact | helm |
| images, from docker archives | crane |
| signature of each, by its digest | cosign, with a key of the releaser |
| SBOM (CycloneDX) and provenance (SLSA 1.0), as signed in-toto statements | cosign |

Nothing asks a transparency log or a certificate authority: whoever installs has the public key.
What is released once is never written over. The tools are built from Go modules (``parts``), or
taken from PATH. docs/install.md has the commands that verify.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

import yaml

from rose_dev.cluster.build import build
from rose_dev.cluster.parts import HELM_PART, RELEASE
from rose_dev.errors import DevelopmentError, ReleaseFailed
from rose_dev.shell import run, succeeds

ROOT = Path(__file__).resolve().parents[2]
CHART = Path("helm") / "rose"
"""In the tree that is released."""
SBOM_IN_IMAGE = "opt/rose/sbom.json"
TARGETS = ("operator", "router", "agent", "weights", "sandbox", "rewards", "engine")
"""Of the Dockerfile: what the chart can name."""
BUILD_TYPE = "https://rose-gpu.dev/release/v1"
"""What was done with which parameters; docs/install.md describes it."""
_PUSH_SECONDS = 1800.0  # an engine's image has several gigabytes
_STEP_SECONDS = 300.0
_BUILD_SECONDS = 7200.0  # an engine's base has some 20 GB, which the first build pulls
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


@dataclass(frozen=True)
class Source:
    """What is released.

    Attributes:
        repository: where the code is, as a URL.
        commit: its hash.
    """

    repository: str
    commit: str


@dataclass(frozen=True)
class ImageBuilder:
    """Builds the Dockerfile's targets.

    Attributes:
        tool: docker, podman or buildah.
        arguments: ``NAME=VALUE`` of the Dockerfile, such as ``BASE``.
    """

    tool: Path
    arguments: tuple[str, ...] = ()

    @classmethod
    def named(cls, name: str, arguments: Sequence[str]) -> ImageBuilder:
        """The builder of that name on PATH; ``auto`` is the first that is there.

        Raises:
            ReleaseFailed: it is not there.
        """
        wanted = _BUILDERS if name == "auto" else (name,)
        for one in wanted:
            if (path := shutil.which(one)) is not None:
                return cls(Path(path), tuple(arguments))
        raise ReleaseFailed(
            f"--build: none of {', '.join(wanted)} is on PATH; install one, or give --images a "
            "folder of docker archives (docs/images.md)"
        )

    def build(self, targets: Sequence[str], tree: Path) -> Iterator[Path]:
        """A docker archive ``TARGET.tar`` of each, one after the other; the next takes its room.

        Args:
            targets: of the Dockerfile.
            tree: what they are built from.

        Raises:
            CommandFailed: it could not be built.
        """
        with tempfile.TemporaryDirectory(prefix="rose-release-") as scratch:
            for target in targets:
                archive = Path(scratch) / f"{target}.tar"
                for command in self.commands(target, archive):
                    run(command, seconds=_BUILD_SECONDS, cwd=tree)
                yield archive
                archive.unlink()

    def commands(self, target: str, archive: Path) -> Iterator[list[str]]:
        """What builds one and writes it into an archive."""
        tool, name = str(self.tool), f"localhost/rose-{target}:release"
        given = [f"--build-arg={one}" for one in self.arguments]
        build = "bud" if self.tool.name == "buildah" else "build"
        yield [tool, build, f"--target={target}", f"--tag={name}", *given, "."]
        match self.tool.name:
            case "buildah":
                yield [tool, "push", name, f"docker-archive:{archive}:{name}"]
            case "podman":
                yield [tool, "save", "--format=docker-archive", f"--output={archive}", name]
            case _:
                yield [tool, "save", f"--output={archive}", name]


_BUILDERS = ("docker", "podman", "buildah")


@contextmanager
def committed(checkout: Path, commit: str) -> Iterator[Path]:
    """A folder of what the commit holds, and nothing else.

    Images take hours in which somebody may work in the checkout, and files that git ignores lie in
    its folders: neither belongs to what the provenance names.

    Raises:
        CommandFailed: git knows no such commit there.
    """
    with tempfile.TemporaryDirectory(prefix="rose-release-") as scratch:
        tree, whole = Path(scratch) / "source", Path(scratch) / "source.tar"
        archive = ["archive", "--format=tar", f"--output={whole}", commit]
        run(["git", "-C", str(checkout), *archive], seconds=_STEP_SECONDS)
        with tarfile.open(whole) as source:
            source.extractall(tree, filter="data")
        whole.unlink()
        yield tree


@dataclass(frozen=True)
class Released:
    """One thing in the registry.

    Attributes:
        name: with its tag, as people write it.
        digest: what is signed.
    """

    name: str
    digest: str

    @property
    def exact(self) -> str:
        """The name of these bytes and no others."""
        return f"{self.name.rpartition(':')[0]}@{self.digest}"


@dataclass(frozen=True)
class Releaser:
    """Pushes and signs.

    Attributes:
        registry: ``host[:port]/path``, without ``oci://``.
        key: cosign's private key; its password is in $COSIGN_PASSWORD.
        tools: binaries by name: helm, crane, cosign.
        plain_http: the registry has no TLS.
    """

    registry: str
    key: Path
    tools: dict[str, Path]
    plain_http: bool = False

    def chart(self, folder: Path) -> Released:
        """Package the chart of this folder and push it.

        Raises:
            ReleaseFailed: this version is there already.
            CommandFailed: helm failed.
        """
        name = f"{self.registry}/charts/{folder.name}:{released_version(folder)}"
        self._refuse_again(name)
        with tempfile.TemporaryDirectory() as scratch:
            self._helm("package", str(folder), f"--destination={scratch}")
            (package,) = Path(scratch).iterdir()
            plain = ["--plain-http"] if self.plain_http else []
            output = self._helm("push", str(package), f"oci://{self.registry}/charts", *plain)
        return Released(name, _digest(output, name))

    def image(self, archive: Path, version: str) -> Released:
        """Push a docker archive ``TARGET.tar`` as ``rose-TARGET``.

        Raises:
            ReleaseFailed: this version is there already.
            CommandFailed: crane failed.
        """
        name = f"{self.registry}/rose-{archive.stem}:{version}"
        self._refuse_again(name)
        self._crane("push", str(archive), name, seconds=_PUSH_SECONDS)
        return Released(name, _digest(self._crane("digest", name), name))

    def refuse_again(self, targets: Sequence[str], chart: Path) -> None:
        """Before hours of building: neither these images nor the chart are there in its version.

        Args:
            targets: of the images.
            chart: its folder.

        Raises:
            ReleaseFailed: one is there already.
        """
        version = released_version(chart)
        for place in (*(f"rose-{target}" for target in targets), f"charts/{chart.name}"):
            self._refuse_again(f"{self.registry}/{place}:{version}")

    def bill_of(self, image: Released) -> dict[str, Any]:
        """The SBOM that the image carries.

        Raises:
            ReleaseFailed: it has none.
        """
        with tempfile.TemporaryDirectory() as scratch:
            flat = Path(scratch) / "image.tar"
            self._crane("export", image.exact, str(flat), seconds=_PUSH_SECONDS)
            try:
                with tarfile.open(flat) as tar:
                    file = tar.extractfile(SBOM_IN_IMAGE)
                    found: dict[str, Any] = json.load(file) if file else {}
            except KeyError as error:
                message = f"{image.name} has no /{SBOM_IN_IMAGE}; build it with the Dockerfile"
                raise ReleaseFailed(message) from error
        return found

    def vouch(self, what: Released, bill: dict[str, Any], provenance: dict[str, Any]) -> None:
        """Sign it, and say under the same key what is in it and how it was made.

        Raises:
            CommandFailed: cosign failed.
        """
        offline = [f"--key={self.key}", "--tlog-upload=false", "--yes"]
        plain = ["--allow-http-registry"] if self.plain_http else []
        self._cosign("sign", *offline, *plain, what.exact)
        with tempfile.TemporaryDirectory() as scratch:
            for kind, predicate in (("cyclonedx", bill), ("slsaprovenance1", provenance)):
                file = Path(scratch) / f"{kind}.json"
                file.write_text(json.dumps(predicate))
                predicate_flags = [f"--type={kind}", f"--predicate={file}"]
                self._cosign("attest", *offline, *plain, *predicate_flags, what.exact)

    def _refuse_again(self, name: str) -> None:
        insecure = ["--insecure"] if self.plain_http else []
        if succeeds([self.tools["crane"], "digest", *insecure, name], seconds=_STEP_SECONDS):
            message = f"{name} is there already; a release is never changed: raise the version"
            raise ReleaseFailed(message)

    def _helm(self, *given: str) -> str:
        done = run([self.tools["helm"], *given], seconds=_PUSH_SECONDS)
        return done.stdout + done.stderr  # where helm tells the digest differs by version

    def _crane(self, *given: str, seconds: float = _STEP_SECONDS) -> str:
        insecure = ["--insecure"] if self.plain_http else []
        return run([self.tools["crane"], *given, *insecure], seconds=seconds).stdout

    def _cosign(self, *given: str) -> None:
        run([self.tools["cosign"], *given], seconds=_STEP_SECONDS)


def released_version(chart: Path) -> str:
    """The chart's, which its images share."""
    version: str = yaml.safe_load((chart / "Chart.yaml").read_text())["version"]
    return version


def _now() -> datetime:
    return datetime.now(UTC)


def provenance(
    source: Source, parameters: dict[str, str], builder: str, times: tuple[datetime, datetime]
) -> dict[str, Any]:
    """The predicate of a SLSA 1.0 provenance (https://slsa.dev/provenance/v1).

    Args:
        source: what was built.
        parameters: what the releaser chose.
        builder: who made it, as a URI.
        times: when it began and ended, UTC.
    """
    return {
        "buildDefinition": {
            "buildType": BUILD_TYPE,
            "externalParameters": parameters,
            "resolvedDependencies": [
                {"uri": f"git+{source.repository}", "digest": {"gitCommit": source.commit}}
            ],
        },
        "runDetails": {
            "builder": {"id": builder},
            "metadata": {"startedOn": _text(times[0]), "finishedOn": _text(times[1])},
        },
    }


def bill_of_chart(folder: Path, version: str, images: dict[str, str]) -> dict[str, Any]:
    """The chart's bill of materials: its files with their hashes, the images released with it.

    Args:
        folder: the chart's.
        version: its version.
        images: digest (``sha256:...``) by name with tag.
    """
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"component": {"type": "application", "name": folder.name, "version": version}},
        "components": [
            *(_image(name, digest) for name, digest in sorted(images.items())),
            *(
                {
                    "type": "file",
                    "name": str(path.relative_to(folder)),
                    "hashes": [_sha256(hashlib.sha256(path.read_bytes()).hexdigest())],
                }
                for path in files
            ),
        ],
    }


def _image(name: str, digest: str) -> dict[str, Any]:
    repository, _, version = name.rpartition(":")
    short = repository.rpartition("/")[2]
    return {
        "type": "container",
        "name": short,
        "version": version,
        "purl": f"pkg:oci/{short}@{quote(digest, safe='')}"
        f"?repository_url={quote(repository, safe='')}&tag={version}",
        "hashes": [_sha256(digest.removeprefix("sha256:"))],
    }


def _sha256(content: str) -> dict[str, str]:
    return {"alg": "SHA-256", "content": content}


def release(
    releaser: Releaser,
    archives: Iterable[Path],
    chart: Path,
    source: Source,
    builder: str,
    *,
    clock: Callable[[], datetime] = _now,
    arguments: Sequence[str] = (),
) -> Iterator[Released]:
    """Push the images, then the chart that names them, and vouch for each as it comes.

    Args:
        releaser: where to.
        archives: of the images; what is built as it is asked for belongs to its image's time.
        chart: its folder.
        source: what they were made of.
        builder: who made them, as a URI.
        clock: UTC.
        arguments: ``NAME=VALUE`` that the images were built with.

    Raises:
        ReleaseFailed: one is there already, or an image has no SBOM.
        CommandFailed: a tool failed; what came before stays in the registry.
    """
    version = released_version(chart)
    images: dict[str, str] = {}
    began = clock()
    for archive in archives:
        image = releaser.image(archive, version)
        built = dict(one.split("=", 1) for one in arguments)
        parameters = {"target": archive.stem, "version": version, **built}
        made = provenance(source, parameters, builder, (began, clock()))
        releaser.vouch(image, releaser.bill_of(image), made)
        images[image.name] = image.digest
        yield image
        began = clock()
    packaged = releaser.chart(chart)
    parameters = {"chart": chart.name, "version": version}
    made = provenance(source, parameters, builder, (began, clock()))
    releaser.vouch(packaged, bill_of_chart(chart, version, images), made)
    yield packaged


def source_of(checkout: Path) -> Source:
    """What lies in a checkout.

    Raises:
        ReleaseFailed: it has changes that no commit holds, so nobody could tell what was released.
        CommandFailed: it is no checkout of git.
    """
    git = ["git", "-C", str(checkout)]
    if changed := run([*git, "status", "--porcelain"], seconds=_STEP_SECONDS).stdout.strip():
        first = changed.splitlines()[0].strip()
        raise ReleaseFailed(f"the checkout has changes without a commit ({first}); commit them")
    commit = run([*git, "rev-parse", "HEAD"], seconds=_STEP_SECONDS).stdout.strip()
    asked = run([*git, "remote", "get-url", "origin"], seconds=_STEP_SECONDS, check=False)
    return Source(asked.stdout.strip() or "https://rose-gpu.dev/", commit)


def _digest(output: str, name: str) -> str:
    found = _DIGEST.search(output)
    if found is None:
        raise ReleaseFailed(f"nothing tells the digest of {name}: {output.strip()!r}")
    return found[0]


def _text(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="make release", description=__doc__)
    add = parser.add_argument
    add("--parts", action="store_true", help="only build the tools, and say where they are")
    add("--registry", default="", help="host[:port]/path, into which all is pushed")
    add("--key", type=Path, help="cosign's private key (cosign generate-key-pair)")
    images = parser.add_mutually_exclusive_group()
    images.add_argument("--images", type=Path, help="folder of docker archives, TARGET.tar")
    images.add_argument(
        "--build",
        nargs="?",
        const="auto",
        choices=("auto", *_BUILDERS),
        help="build the Dockerfile's targets; with neither the chart alone is released",
    )
    add("--targets", nargs="+", choices=TARGETS, default=list(TARGETS), help="of --build")
    add("--build-arg", action="append", default=[], metavar="NAME=VALUE", help="of --build")
    add("--builder", default="https://rose-gpu.dev/release/by-hand", help="who releases, a URI")
    add("--plain-http", action="store_true", help="the registry has no TLS")
    return parser


def _checked(given: argparse.Namespace) -> tuple[ImageBuilder | list[Path], Source]:
    """What makes the images, or their archives, and what of.

    Raises:
        ReleaseFailed: something is missing; says what.
    """
    if not given.registry or given.key is None or not given.key.is_file():
        raise ReleaseFailed(
            "name the registry and the key: make release "
            "ARGS='--registry registry.example.com/rose --key cosign.key'"
        )
    if "COSIGN_PASSWORD" not in os.environ:
        raise ReleaseFailed("the key's password is missing: set COSIGN_PASSWORD")
    if wrong := [one for one in given.build_arg if "=" not in one]:
        raise ReleaseFailed(f"--build-arg {wrong[0]}: give it a value, NAME=VALUE")
    if given.build:
        return ImageBuilder.named(given.build, given.build_arg), source_of(ROOT)
    archives = sorted(given.images.glob("*.tar")) if given.images else []
    if given.images and not archives:
        raise ReleaseFailed(f"--images {given.images}: there is no TARGET.tar")
    return archives, source_of(ROOT)


def main(argv: list[str]) -> int:
    """0 released, 1 something is wrong, which is said."""
    given = _parser().parse_args(argv)
    try:
        if given.parts:
            for name, path in build((HELM_PART, *RELEASE)).items():
                print(f"{name}: {path}")
            return 0
        # Bad input is told before tools are built, which takes minutes the first time.
        images, source = _checked(given)
        tools = build((HELM_PART, *RELEASE))
        releaser = Releaser(
            given.registry.removeprefix("oci://").rstrip("/"), given.key, tools, given.plain_http
        )
        with committed(ROOT, source.commit) as tree:
            chart = tree / CHART
            if isinstance(images, ImageBuilder):
                releaser.refuse_again(given.targets, chart)
                archives: Iterable[Path] = images.build(given.targets, tree)
            else:
                archives = images
            made = release(
                releaser, archives, chart, source, given.builder, arguments=given.build_arg
            )
            for one in made:
                print(f"{one.name} {one.digest}", flush=True)
    except DevelopmentError as error:
        sys.stderr.write(f"release: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
