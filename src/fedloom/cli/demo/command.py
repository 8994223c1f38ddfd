"""`fedloom demo`: put the claims of five papers to the test."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from fedloom.cli.demo.scene import DemoScene
from fedloom.cli.demo.scenes import DEMO_SCENES
from fedloom.cli.options import Out, Quiet
from fedloom.errors import unknown_name_error


def demo(
    scenes: Annotated[
        list[str] | None,
        typer.Argument(metavar="SCENE", help="fedcross, fedmr, fedcda, lss or dynafed; by default all"),
    ] = None,
    out: Out = None,
    quiet: Quiet = False,
) -> None:
    """Put the claims of five papers to the test, in less than four minutes on two idle cores.

    Prints the command of each scene, its table, and whether the claim is supported. Writes one report.

    To resume a stopped demo, repeat the command with the same --out.
    """
    chosen = _select_scenes(scenes or [])

    from fedloom.cli.demo.play import play_demo

    play_demo(chosen, Path(out) if out else None, quiet)


def _select_scenes(names: Sequence[str]) -> list[DemoScene]:
    """Return the scenes of these methods, in the order of the demo; all without names."""
    known = {name for scene in DEMO_SCENES for name in scene.names}
    for name in names:
        if name not in known:
            raise unknown_name_error("scene", name, known)
    return [scene for scene in DEMO_SCENES if not names or set(names) & set(scene.names)]
