"""A release into a registry that is started here: pulled back, verified, refused where wrong."""

from __future__ import annotations

import base64
import io
import json
import os
import socket
import subprocess
import tarfile
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from rose_dev import release
from rose_dev.cluster import parts
from rose_dev.errors import CommandFailed, ReleaseFailed
from rose_dev.release import Released, Releaser, Source
from rose_dev.shell import run
from rose_dev.waiting import wait_until
from rose_wire.ports import free_port

TOOLS = {part.name: parts.find(part) for part in (parts.HELM_PART, *parts.RELEASE)}
CHART = Path(__file__).parents[2] / "helm" / "rose"
SOURCE = Source("https://example.com/rose.git", "c" * 40)
BUILDER = "https://example.com/releaser"
BEGAN = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
BILL = {"bomFormat": "CycloneDX", "specVersion": "1.5", "version": 1, "components": []}
SECONDS = 120

needs_tools = pytest.mark.skipif(
    None in TOOLS.values(), reason="helm, crane or cosign is not built: make release-parts"
)


def tool(name: str, *words: str | Path) -> str:
    path = TOOLS[name]
    assert path is not None
    return run([path, *words], seconds=SECONDS).stdout


def answers(port: int) -> bool:
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture(scope="module")
def registry() -> Iterator[str]:
    port = free_port()
    serve = [str(TOOLS["crane"]), "registry", "serve", f"--address=127.0.0.1:{port}"]
    with subprocess.Popen(serve, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            wait_until(lambda: answers(port), "the registry", seconds=SECONDS)
            yield f"127.0.0.1:{port}"
        finally:
            process.kill()


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the key of the releaser and that of somebody else, pairs of cosign's."""
    folder = tmp_path_factory.mktemp("keys")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COSIGN_PASSWORD", "password")
        for name in ("ours", "theirs"):
            tool("cosign", "generate-key-pair", f"--output-key-prefix={folder / name}")
        # Else cosign asks the network for the public authorities, which no key of ours needs.
        root = {"mediaType": "application/vnd.dev.sigstore.trustedroot+json;version=0.1"}
        (folder / "root.json").write_text(json.dumps(root))
        yield folder


def releaser(registry: str, keys: Path, place: str) -> Releaser:
    tools = {name: path for name, path in TOOLS.items() if path is not None}
    return Releaser(f"{registry}/{place}", keys / "ours.key", tools, plain_http=True)


def verify(keys: Path, name: str, *more: str, key: str = "ours", verb: str = "verify") -> Any:  # noqa: ANN401
    """What cosign prints of a name whose signature is good; CommandFailed where it is not."""
    root = keys / "root.json"
    offline = [f"--key={keys / key}.pub", "--private-infrastructure", f"--trusted-root={root}"]
    return json.loads(tool("cosign", verb, *offline, "--allow-http-registry", *more, name))


def statement(keys: Path, name: str, kind: str) -> dict[str, Any]:
    found = verify(keys, name, f"--type={kind}", verb="verify-attestation")
    answer: dict[str, Any] = json.loads(base64.b64decode(found["payload"]))
    return answer


def an_archive(folder: Path, target: str, files: dict[str, bytes]) -> Path:
    """A docker archive of one layer."""
    layer = folder / f"{target}.layer"
    with tarfile.open(layer, "w") as tar:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    archive = folder / f"{target}.tar"
    tool("crane", "append", f"--new_layer={layer}", "--new_tag=local/x:1", f"--output={archive}")
    return archive


@needs_tools
def test_a_release_is_pulled_back_and_everything_in_it_verified(
    registry: str, keys: Path, tmp_path: Path
) -> None:
    archive = an_archive(tmp_path, "router", {release.SBOM_IN_IMAGE: json.dumps(BILL).encode()})
    ours = releaser(registry, keys, "whole")
    image, chart = release.release(ours, [archive], CHART, SOURCE, BUILDER, clock=lambda: BEGAN)
    assert image.name.startswith(f"{registry}/whole/rose-router:")

    place, _, version = chart.name.rpartition(":")
    pull = ["pull", f"oci://{place}", f"--version={version}", "--untar", "--plain-http"]
    tool("helm", *pull, f"--untardir={tmp_path}")
    for path in ("values.yaml", "templates/operator.yaml", "crd-files/rolloutleases.yaml"):
        assert (tmp_path / "rose" / path).read_bytes() == (CHART / path).read_bytes()

    for one in (image, chart):
        (signed,) = verify(keys, one.name)
        assert signed["critical"]["image"]["docker-manifest-digest"] == one.digest
        made = statement(keys, one.name, "slsaprovenance1")
        assert made["subject"][0]["digest"]["sha256"] == one.digest.removeprefix("sha256:")
        (code,) = made["predicate"]["buildDefinition"]["resolvedDependencies"]
        assert code["digest"]["gitCommit"] == SOURCE.commit
    assert statement(keys, image.name, "cyclonedx")["predicate"] == BILL
    listed = statement(keys, chart.name, "cyclonedx")["predicate"]["components"]
    (named,) = [one for one in listed if one["type"] == "container"]
    assert named["hashes"][0]["content"] == image.digest.removeprefix("sha256:")


@needs_tools
def test_what_somebody_else_signed_or_pushed_is_not_taken_for_ours(
    registry: str, keys: Path, tmp_path: Path
) -> None:
    ours = releaser(registry, keys, "foreign")
    *_, chart = release.release(ours, [], CHART, SOURCE, BUILDER)
    with pytest.raises(CommandFailed, match="invalid signature"):
        verify(keys, chart.name, key="theirs")
    layer = tmp_path / "evil.layer"
    with tarfile.open(layer, "w"):
        pass
    tool("crane", "append", f"--new_layer={layer}", f"--new_tag={chart.name}", "--insecure")
    with pytest.raises(CommandFailed, match="no signatures found"):
        verify(keys, chart.name)
    assert verify(keys, chart.exact)


@needs_tools
def test_a_version_is_released_once(registry: str, keys: Path, tmp_path: Path) -> None:
    ours = releaser(registry, keys, "twice")
    ours.refuse_again(release.TARGETS, CHART)
    archive = an_archive(tmp_path, "router", {})
    ours.image(archive, release.released_version(CHART))
    with pytest.raises(ReleaseFailed, match=r"rose-router.* is there already"):
        ours.refuse_again(release.TARGETS, CHART)
    before = ours.chart(CHART)
    with pytest.raises(ReleaseFailed, match="there already"):
        ours.chart(CHART)
    with pytest.raises(ReleaseFailed, match=r"charts/rose.* is there already"):
        ours.refuse_again([], CHART)
    digest = tool("crane", "digest", "--insecure", before.name).strip()
    assert digest == before.digest


@needs_tools
def test_an_image_without_a_bill_of_materials_is_not_vouched_for(
    registry: str, keys: Path, tmp_path: Path
) -> None:
    archive = an_archive(tmp_path, "agent", {"etc/motd": b"hello"})
    with pytest.raises(ReleaseFailed, match="sbom"):
        next(release.release(releaser(registry, keys, "bare"), [archive], CHART, SOURCE, BUILDER))


@pytest.mark.parametrize(
    ("tool", "build", "written"),
    [
        ("docker", "build", ["save", "--output=out/agent.tar", "localhost/rose-agent:release"]),
        (
            "podman",
            "build",
            [
                "save",
                "--format=docker-archive",
                "--output=out/agent.tar",
                "localhost/rose-agent:release",
            ],
        ),
        (
            "buildah",
            "bud",
            [
                "push",
                "localhost/rose-agent:release",
                "docker-archive:out/agent.tar:localhost/rose-agent:release",
            ],
        ),
    ],
)
def test_each_builder_makes_the_target_and_writes_a_docker_archive(
    tool: str, build: str, written: list[str]
) -> None:
    one = release.ImageBuilder(Path(tool), ("BASE=localhost/python:bookworm",))
    given = "--build-arg=BASE=localhost/python:bookworm"
    asked = ["--target=agent", "--tag=localhost/rose-agent:release", given]
    assert list(one.commands("agent", Path("out/agent.tar"))) == [
        [tool, build, *asked, "."],
        [tool, *written],
    ]


def a_commit(checkout: Path) -> str:
    """A new checkout with a file and a chart."""
    chart = checkout / release.CHART
    chart.mkdir(parents=True)
    (checkout / "code.py").write_text("as committed")
    (chart / "Chart.yaml").write_text("version: 1.2.3")
    author = ("-c", "user.name=a", "-c", "user.email=a@example.com")
    for words in (("init", "--quiet"), ("add", "."), (*author, "commit", "--quiet", "-m", "One")):
        run(["git", "-C", checkout, *words], seconds=30)
    return run(["git", "-C", checkout, "rev-parse", "HEAD"], seconds=30).stdout.strip()


def edit(checkout: Path) -> None:
    """As somebody does who goes on working there."""
    chart = checkout / release.CHART
    (checkout / "code.py").write_text("edited while it was built")
    (chart / "Chart.yaml").write_text("version: 9.9.9")
    (checkout / "secret").touch()
    (chart / "secret").touch()


def test_what_is_released_is_the_commits_and_not_what_lies_beside_it(tmp_path: Path) -> None:
    """Images and chart, however long the images take."""
    checkout, tool = tmp_path / "checkout", tmp_path / "docker"
    commit = a_commit(checkout)
    edit(checkout)
    tool.write_text('#!/bin/sh\n[ "$1" = build ] || cp code.py "${2#--output=}"; [ ! -e secret ]\n')
    tool.chmod(0o755)
    with release.committed(checkout, commit) as tree:
        made = release.ImageBuilder(tool).build(["agent", "router"], tree)
        assert [(one.name, one.read_text()) for one in made] == [
            ("agent.tar", "as committed"),
            ("router.tar", "as committed"),
        ]
        assert release.released_version(tree / release.CHART) == "1.2.3"
        assert [path.name for path in (tree / release.CHART).iterdir()] == ["Chart.yaml"]


@pytest.mark.parametrize("images", [(), ("--build", "docker", "--targets", "agent")])
def test_a_release_is_the_commits_however_long_its_tools_took(
    images: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The checkout is edited after the commit was named, and before anything is made of it."""
    checkout, tool, key = tmp_path / "checkout", tmp_path / "docker", tmp_path / "key"
    a_commit(checkout)
    tool.write_text('#!/bin/sh\n[ "$1" = build ] || cp code.py "${2#--output=}"\n')
    tool.chmod(0o755)
    key.touch()

    def build(_: object) -> dict[str, Path]:
        edit(checkout)
        return {}

    def made(
        _: Releaser, archives: Iterable[Path], chart: Path, *__: object, **___: object
    ) -> Iterator[Released]:
        for archive in archives:
            yield Released(archive.name, archive.read_text())
        yield Released("chart", release.released_version(chart))

    monkeypatch.setenv("COSIGN_PASSWORD", "x")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(release, "ROOT", checkout)
    monkeypatch.setattr(release, "build", build)
    monkeypatch.setattr(release, "release", made)
    monkeypatch.setattr(Releaser, "refuse_again", lambda *_: None)
    words = ("--registry", "registry.example.com", "--key", str(key), *images)
    assert release.main([*words]) == 0
    output = capsys.readouterr().out.splitlines()
    assert output == [*(["agent.tar as committed"] if images else []), "chart 1.2.3"]


def test_without_any_builder_a_release_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ReleaseFailed, match=r"docker, podman, buildah.*--images"):
        release.ImageBuilder.named("auto", ())
    (tmp_path / "buildah").touch(0o755)
    assert release.ImageBuilder.named("auto", ()).tool == tmp_path / "buildah"


def test_provenance_names_the_commit_the_parameters_and_the_times() -> None:
    times = (BEGAN, BEGAN + timedelta(seconds=61))
    reported = release.provenance(SOURCE, {"chart": "rose"}, BUILDER, times)
    assert reported["buildDefinition"]["externalParameters"] == {"chart": "rose"}
    (code,) = reported["buildDefinition"]["resolvedDependencies"]
    assert code == {"uri": f"git+{SOURCE.repository}", "digest": {"gitCommit": SOURCE.commit}}
    assert reported["runDetails"]["metadata"] == {
        "startedOn": "2026-01-02T03:04:05Z",
        "finishedOn": "2026-01-02T03:05:06Z",
    }


def test_a_checkout_with_changes_is_not_released(tmp_path: Path) -> None:
    git = ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x@example.com"]
    run([*git, "init", "-q"], seconds=SECONDS)
    (tmp_path / "file").write_text("1")
    run([*git, "add", "."], seconds=SECONDS)
    run([*git, "commit", "-qm", "x"], seconds=SECONDS)
    assert len(release.source_of(tmp_path).commit) == len(SOURCE.commit)
    (tmp_path / "file").write_text("2")
    with pytest.raises(ReleaseFailed, match="file"):
        release.source_of(tmp_path)


def test_the_charts_bill_has_every_file_and_the_images_by_digest() -> None:
    image = Released("registry.example.com:5000/rose/rose-agent:1.0", "sha256:" + "a" * 64)
    found = release.bill_of_chart(CHART, "1.0", {image.name: image.digest})["components"]
    (container,) = [one for one in found if one["type"] == "container"]
    assert (container["name"], container["version"]) == ("rose-agent", "1.0")
    assert "registry.example.com%3A5000%2Frose%2Frose-agent" in container["purl"]
    files = {one["name"] for one in found if one["type"] == "file"}
    assert files == {str(p.relative_to(CHART)) for p in CHART.rglob("*") if p.is_file()}
    assert image.exact == f"registry.example.com:5000/rose/rose-agent@{image.digest}"


def test_no_key_no_password_no_release(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Told at once: building the tools takes minutes the first time."""
    monkeypatch.setattr(release, "build", lambda _: pytest.fail("tools were built before"))
    monkeypatch.delenv("COSIGN_PASSWORD", raising=False)
    assert release.main(["--registry", "x"]) == 1
    assert "--key" in capsys.readouterr().err
    (tmp_path / "key").touch()
    assert release.main(["--registry", "x", "--key", str(tmp_path / "key")]) == 1
    assert "COSIGN_PASSWORD" in capsys.readouterr().err
