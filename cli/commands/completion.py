"""`torpor completion`: what a shell evaluates to complete command lines of torpor."""

from __future__ import annotations

import sys
from typing import Annotated, Final, Literal

from ..reach.options import JsonOption, argument
from ..view.output import Output

ShellArgument = Annotated[Literal["bash", "zsh", "fish"], argument("bash|zsh|fish", "The shell.")]

_SCRIPTS: Final = {
    "bash": """\
_torpor() {
    local line="${COMP_LINE:0:COMP_POINT}" found
    local -a words
    read -r -a words <<< "$line"
    [[ $line == *[[:space:]] ]] && words+=("")
    mapfile -t COMPREPLY < <(TORPOR_COMPLETING=1 torpor "${words[@]:1}" 2> /dev/null)
    [[ ${#COMPREPLY[@]} == 1 && ${COMPREPLY[0]} == */ ]] && compopt -o nospace
}
COMP_WORDBREAKS=${COMP_WORDBREAKS//[@:]/}
complete -o default -F _torpor torpor
""",
    "zsh": """\
_torpor() {
    local -a found
    found=("${(@f)$(TORPOR_COMPLETING=1 torpor "${words[@]:1:$((CURRENT - 1))}" 2> /dev/null)}")
    if [[ -n "$found" ]]; then compadd -a found; else _files; fi
}
compdef _torpor torpor
""",
    "fish": """\
complete -c torpor -a '(TORPOR_COMPLETING=1 torpor (commandline -opc)[2..] (commandline -ct) 2> /dev/null)'
""",
}


def completion(shell: ShellArgument, as_json: JsonOption = False) -> None:
    """Completes commands, options, and the names of sessions, tags, labels and models, which it reads in the store's
    files. Put the line of your shell into its startup file.

    [bold]Examples[/]

    [cyan]torpor completion bash > ~/.local/share/bash-completion/completions/torpor[/]
    [cyan]eval "$(torpor completion zsh)"[/]
    [cyan]torpor completion fish > ~/.config/fish/completions/torpor.fish[/]
    """
    if as_json:
        Output(as_json=True).document("completion", {"shell": shell, "script": _SCRIPTS[shell]})
    else:
        sys.stdout.write(_SCRIPTS[shell])
