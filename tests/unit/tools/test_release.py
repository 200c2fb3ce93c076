"""The checks of tools/release, on small repositories. Building and installing is not run here."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import release
from release import ReleaseError, Runner, check_changelog, check_tree, export, torch_requirement

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")

REPOSITORY = Path(__file__).resolve().parents[3]
IDENTITY = ("-c", "user.name=Tester", "-c", "user.email=tester@example.com")


def git(repository: Path, *arguments: str) -> None:
    command = ["git", "-C", str(repository), *IDENTITY, *arguments]
    subprocess.run(command, check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository that is ready for the release of 1.2.3."""
    (tmp_path / "shmllm").mkdir()
    (tmp_path / "shmllm" / "version.py").write_text('"""Text."""\n\n__version__ = "1.2.3"\n')
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## [1.2.3] - 2030-01-31\n")
    (tmp_path / ".gitignore").write_text("build/\n")
    git(tmp_path, "init", "--initial-branch", "main")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--message", "first")
    return tmp_path


def test_a_repository_that_is_ready_has_a_version(repository: Path) -> None:
    (repository / "build").mkdir()
    (repository / "build" / "ignored").touch()
    assert check_tree(repository) == "1.2.3"


def test_another_branch_is_refused(repository: Path) -> None:
    git(repository, "switch", "--create", "feature")
    with pytest.raises(ReleaseError, match="the branch is 'feature'; releases are made on 'main'"):
        check_tree(repository)


@pytest.mark.parametrize("name", ["new.txt", "CHANGELOG.md"])
def test_uncommitted_files_are_refused(repository: Path, name: str) -> None:
    with open(repository / name, "a") as file:
        file.write("more\n")
    with pytest.raises(ReleaseError, match=f"1 files are not committed, such as {name}"):
        check_tree(repository)


def test_an_existing_tag_is_refused(repository: Path) -> None:
    git(repository, "tag", "v1.2.3")
    with pytest.raises(ReleaseError, match=r"the tag v1\.2\.3 exists"):
        check_tree(repository)


@pytest.mark.parametrize("version", ["1.2", "1.2.3.dev0", "1.2.3rc1", "next"])
def test_only_final_versions_are_released(repository: Path, version: str) -> None:
    (repository / "shmllm" / "version.py").write_text(f'__version__ = "{version}"\n')
    with pytest.raises(ReleaseError, match="has no line like __version__"):
        check_tree(repository)


@pytest.mark.parametrize(
    ("heading", "message"),
    [
        ("## [Unreleased]", 'no section for 1.2.3; insert the line "## [1.2.3] - '),
        ("## [1.2.30] - 2030-01-31", "no section for 1.2.3"),
        ("## [1.2.3]", "without a date; it has to be like"),
        ("## [1.2.3] - 2030-02-31", "without a date"),
        ("## [1.2.3] - soon", "without a date"),
    ],
)
def test_a_changelog_without_the_version_or_its_date_is_refused(heading: str, message: str) -> None:
    with pytest.raises(ReleaseError) as raised:
        check_changelog(f"# Changelog\n\n{heading}\n\n- A change.\n", "1.2.3")
    assert message in str(raised.value)


def test_only_committed_files_are_exported(repository: Path, tmp_path: Path) -> None:
    (repository / "build").mkdir()
    (repository / "build" / "ignored").touch()
    target = tmp_path / "exported"
    export(repository, target)
    names = sorted(path.name for path in target.iterdir())
    assert names == [".gitignore", "CHANGELOG.md", "shmllm"]


def test_the_requirement_for_torch_is_read_from_setup_cfg() -> None:
    assert torch_requirement(REPOSITORY).startswith("torch>=")


def test_a_failing_command_names_the_log(tmp_path: Path) -> None:
    with open(tmp_path / "log", "w") as log:
        runner = Runner(log)
        assert runner.run("sh", "-c", "echo $PYTHONPATH text", cwd=tmp_path) == "text\n"
        with pytest.raises(ReleaseError, match=r"exit code 3 of: sh -c .*; see .*log"):
            runner.run("sh", "-c", "echo reason >&2; exit 3", cwd=tmp_path)
    assert "reason" in (tmp_path / "log").read_text()


def test_an_error_is_one_line_and_exit_code_1(
    repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (repository / "new.txt").touch()
    monkeypatch.setattr(release, "REPOSITORY", repository)
    assert release.main(["--dry-run"]) == 1
    assert capsys.readouterr().err.startswith("release: 1 files are not committed")
    assert not (repository / "dist").exists()
