"""``make release``: chart and images into an OCI registry, signed, with SBOM and provenance.

| step | by |
|---|---|
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
import json
import os
import re
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from rose_dev import sbom
from rose_dev.build import build
from rose_dev.errors import DevelopmentError, ReleaseFailed
from rose_dev.parts import HELM_PART, RELEASE
from rose_dev.shell import run, succeeds

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "helm" / "rose"
SBOM_IN_IMAGE = "opt/rose/sbom.json"
BUILD_TYPE = "https://rose-gpu.dev/release/v1"
"""What was done with which parameters; docs/install.md describes it."""
_PUSH_SECONDS = 1800.0  # an engine's image has several gigabytes
_STEP_SECONDS = 300.0
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

    def chart(self, folder: Path = CHART) -> Released:
        """Package the chart and push it.

        Raises:
            ReleaseFailed: this version is there already.
            CommandFailed: helm failed.
        """
        version = yaml.safe_load((folder / "Chart.yaml").read_text())["version"]
        name = f"{self.registry}/charts/{folder.name}:{version}"
        self._refuse_again(name)
        with tempfile.TemporaryDirectory() as scratch:
            self._helm("package", str(folder), f"--destination={scratch}")
            (package,) = Path(scratch).iterdir()
            plain = ["--plain-http"] if self.plain_http else []
            told = self._helm("push", str(package), f"oci://{self.registry}/charts", *plain)
        return Released(name, _digest(told, name))

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
                said = [f"--type={kind}", f"--predicate={file}"]
                self._cosign("attest", *offline, *plain, *said, what.exact)

    def _refuse_again(self, name: str) -> None:
        insecure = ["--insecure"] if self.plain_http else []
        if succeeds([self.tools["crane"], "digest", *insecure, name], seconds=_STEP_SECONDS):
            message = f"{name} is there already; a release is never changed: raise the version"
            raise ReleaseFailed(message)

    def _helm(self, *words: str) -> str:
        done = run([self.tools["helm"], *words], seconds=_PUSH_SECONDS)
        return done.stdout + done.stderr  # where helm tells the digest differs by version

    def _crane(self, *words: str, seconds: float = _STEP_SECONDS) -> str:
        insecure = ["--insecure"] if self.plain_http else []
        return run([self.tools["crane"], *words, *insecure], seconds=seconds).stdout

    def _cosign(self, *words: str) -> None:
        run([self.tools["cosign"], *words], seconds=_STEP_SECONDS)


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


def release(
    releaser: Releaser,
    archives: Sequence[Path],
    source: Source,
    builder: str,
    clock: Callable[[], datetime] = _now,
) -> Iterator[Released]:
    """Push the images, then the chart that names them, and vouch for each as it comes.

    Raises:
        ReleaseFailed: one is there already, or an image has no SBOM.
        CommandFailed: a tool failed; what came before stays in the registry.
    """
    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["version"]
    images: dict[str, str] = {}
    for archive in archives:
        began = clock()
        image = releaser.image(archive, version)
        parameters = {"target": archive.stem, "version": version}
        made = provenance(source, parameters, builder, (began, clock()))
        releaser.vouch(image, releaser.bill_of(image), made)
        images[image.name] = image.digest
        yield image
    began = clock()
    chart = releaser.chart()
    parameters = {"chart": CHART.name, "version": version}
    made = provenance(source, parameters, builder, (began, clock()))
    releaser.vouch(chart, sbom.of_chart(CHART, version, images), made)
    yield chart


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


def _digest(told: str, name: str) -> str:
    found = _DIGEST.search(told)
    if found is None:
        raise ReleaseFailed(f"nothing tells the digest of {name}: {told.strip()!r}")
    return found[0]


def _text(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="make release", description=__doc__)
    add = parser.add_argument
    add("--parts", action="store_true", help="only build the tools, and say where they are")
    add("--registry", default="", help="host[:port]/path, into which all is pushed")
    add("--key", type=Path, help="cosign's private key (cosign generate-key-pair)")
    add("--images", type=Path, help="folder of docker archives, TARGET.tar; without it the chart")
    add("--builder", default="https://rose-gpu.dev/release/by-hand", help="who releases, a URI")
    add("--plain-http", action="store_true", help="the registry has no TLS")
    return parser


def _checked(given: argparse.Namespace) -> list[Path]:
    """The archives to release.

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
    archives = sorted(given.images.glob("*.tar")) if given.images else []
    if given.images and not archives:
        raise ReleaseFailed(f"--images {given.images}: there is no TARGET.tar")
    return archives


def main(argv: list[str]) -> int:
    """0 released, 1 something is wrong, which is said."""
    given = _parser().parse_args(argv)
    try:
        # Bad input is told before tools are built, which takes minutes the first time.
        archives = [] if given.parts else _checked(given)
        tools = build((HELM_PART, *RELEASE))
        if given.parts:
            for name, path in tools.items():
                print(f"{name}: {path}")
            return 0
        releaser = Releaser(
            given.registry.removeprefix("oci://").rstrip("/"), given.key, tools, given.plain_http
        )
        for one in release(releaser, archives, source_of(ROOT), given.builder):
            print(f"{one.name} {one.digest}", flush=True)
    except DevelopmentError as error:
        sys.stderr.write(f"release: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
