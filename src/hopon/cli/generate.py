"""``hopon generate``: its flags, and answers to a file of prompts. The engine is behind :mod:`hopon.llm`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hopon.cli.engine_flags import CacheDir, Dtype, Level, MaxModelLen, MaxNumBatchedTokens, MaxNumSeqs, Model, Threads
from hopon.cli.environment import cache_root
from hopon.cli.terminal import download_bar

if TYPE_CHECKING:
    from hopon.core.types import SamplingParams
    from hopon.jsonl import Line
    from hopon.llm import LLM, Prompt, RequestOutput


def generate(
    model: Model,
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", help="One prompt; the answer goes to stdout.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Put the prompt into the model's chat template.")] = False,
    input_file: Annotated[
        Path | None, typer.Option("--input", help="A file of prompts, one JSON string or object a line.")
    ] = None,
    output_file: Annotated[
        Path | None, typer.Option("--output", help="A new file for the answers, one JSON object a line.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens to generate.")] = 256,
    min_tokens: Annotated[int, typer.Option(help="Fewest tokens to generate.")] = 0,
    temperature: Annotated[float, typer.Option(help="0 takes the most likely token.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Sample from the smallest set of this probability.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Sample from the k most likely tokens; 0 for all.")] = 0,
    min_p: Annotated[float, typer.Option(help="Drop tokens below this share of the most likely one.")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1: fewer tokens of prompt and answer again.")] = 1.0,
    presence_penalty: Annotated[float, typer.Option(help="Above 0: fewer tokens of the answer again.")] = 0.0,
    frequency_penalty: Annotated[float, typer.Option(help="The same, for each time that a token occurred.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Makes sampling repeatable.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Stop before this text; may be given several times.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on behind the model's end token.")] = False,
    logprobs: Annotated[int | None, typer.Option(help="Write log-probabilities to --output.")] = None,
    dtype: Dtype = "auto",
    threads: Threads = 0,
    level: Level = None,
    max_num_seqs: MaxNumSeqs = None,
    max_num_batched_tokens: MaxNumBatchedTokens = None,
    max_model_len: MaxModelLen = None,
    cache_dir: CacheDir = None,
) -> None:
    """Answer one prompt, or a file of prompts, without a server."""
    from hopon.core.types import SamplingParams

    if (prompt is None) == (input_file is None):
        raise typer.BadParameter("give either -p or --input")
    if (input_file is None) != (output_file is None):
        raise typer.BadParameter("--input and --output belong together")
    if chat and prompt is None:
        raise typer.BadParameter("--chat belongs to -p; in a file a line with messages is a conversation")
    params = SamplingParams(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        ignore_eos=ignore_eos,
        stop=tuple(stop or ()),
        seed=seed,
        logprobs=logprobs,
    )
    # Before the model is loaded, so that a bad file is told at once.
    lines = _read_lines(input_file, output_file, params) if input_file is not None else []
    from hopon.llm import LLM

    with download_bar() as progress:
        llm = LLM(
            model,
            dtype=dtype,
            threads=threads,
            level=level,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            cache_dir=cache_dir or cache_root(),
            progress=progress,
        )
    with llm:
        if output_file is not None:
            _answer_file(llm, lines, output_file)
        elif prompt is not None:
            message = {"role": "user", "content": prompt}
            [output] = llm.chat([message], params) if chat else llm.generate(prompt, params)
            print(output.outputs[0].text)


def _read_lines(source: Path, target: Path | None, params: SamplingParams) -> list[Line]:
    from hopon.jsonl import read_lines

    if target is not None and target.exists():
        raise FileExistsError(f"{target} exists and may hold answers; name another file")
    return read_lines(source, params)


def _answer_file(llm: LLM, lines: list[Line], target: Path) -> None:
    """Answer all lines into a new file; ends with status 1 when some could not be answered."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    from hopon.jsonl import AnswerFile, answer

    prompts: list[Prompt] = []
    for line in lines:
        if line.messages is None:
            assert line.prompt is not None, "a line has a prompt or messages"
            prompts.append(line.prompt)
            continue
        try:
            prompts.append(llm.tokenizer.encode_chat(line.messages))
        except ValueError as error:
            raise ValueError(f"line {line.number}: {error}") from error
    refused: list[int] = []
    num_answered = 0
    columns = (TextColumn("answers"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with AnswerFile(target) as answers, Bar(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("answers", total=len(lines))

        def write(index: int, output: RequestOutput) -> None:
            nonlocal num_answered
            num_answered += 1
            if output.error:
                refused.append(lines[index].number)
            answers.add(index, answer(lines[index], output))
            bar.advance(task)

        try:
            llm.answer_each(prompts, [line.params for line in lines], write)
        except KeyboardInterrupt:
            bar.stop()
            sys.exit(f"hopon: interrupted; {num_answered} of {len(lines)} answers are in {target}")
    if refused:
        sys.exit(f"hopon: {len(refused)} of {len(lines)} lines could not be answered, the first is line {refused[0]}")
