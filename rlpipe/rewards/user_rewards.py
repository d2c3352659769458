"""Load reward functions and classes of users as functions of samples.

| form | call |
|---|---|
| `reward(sample) -> float or dict` | one sample |
| `reward(samples) -> list` | with `group: true`, all samples of a group |
| `custom_rm(args, sample)`, `custom_rm(args, samples)` | slime's (`rlpipe.slime.args`) |
| `reward(completions, answer, **kwargs) -> list` | TRL's, a parameter named `completions` |
| class with `compute_reward(prompts, responses) -> list` | lists of length 1 without `group` |
| class with `__call__` | like a function |

A function in TRL's form gets lists by keyword, of length 1 without `group`: `prompts`,
`completions`, `completion_ids`, the label under the name `data.prompts.label_key` and every entry
of the rows' metadata under its own name. A completion is text, or for a prompt of messages
`[{"role": "assistant", "content": text}]`, without special tokens at its end.

A class is instantiated once with `arguments`. Each form can be `async`. Names and number of the
parameters decide the form; a function that has none of them is refused at start-up.

Entry points: `load_custom`, `needed_columns`, `reads_messages`.
Source: TRL, docs/source/rewards.md. Differs: labels that are numbers are strings, there is no
`trainer_state`, and None is an error and not an absent reward.
"""

from __future__ import annotations

import functools
import inspect
from argparse import Namespace
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import Any, Literal

from rlpipe.config.data import PythonReward, RewardConfig, RewardFunction
from rlpipe.config.guard import error_text, guarded
from rlpipe.config.hooks import load_hook
from rlpipe.errors import ConfigError
from rlpipe.rewards.answers import without_end
from rlpipe.types import Prompt, Sample

FORMS = (
    "reward(sample); slime's reward(args, sample); TRL's reward(completions, answer, **kwargs) or "
    "reward(prompts, completions, **kwargs); or a class with compute_reward(prompts, responses)"
)
TRL_ARGUMENTS = ("prompts", "completions", "completion_ids")
Form = Literal["sample", "slime", "trl"]


def load_custom(config: PythonReward, args: Namespace | None = None) -> Callable[[Any], Any]:
    """Return the user's reward as a function of one sample, or with `group` of a list of samples.

    Raises: ConfigError if it cannot be loaded or instantiated, has none of the forms, or needs
    `args` and there are none.
    """
    function = load_hook(config.path)
    if inspect.isclass(function):
        function = _instance(function, config)
        if (method := getattr(function, "compute_reward", None)) is not None:
            return _from_compute_reward(method, config)
    elif config.arguments:
        raise ConfigError(
            "reward.function.arguments are for classes, and the reward is a function",
            where="reward.function.arguments",
            found=config.path,
            do="remove the arguments, or write a class with __call__(self, sample)",
        )
    form = _form(function, config.path)
    if form == "trl":
        return _from_trl(function, config, args)
    if form == "sample":
        return function
    if args is None:
        raise ConfigError(
            "the reward function needs args, which only a run provides",
            where=config.path,
            expected="reward(sample)",
        )
    if _is_async(function):
        return _AsyncWithArgs(function, args)
    return lambda samples: function(args, samples)


def reads_messages(reward: RewardConfig) -> bool:
    """True if the reward is in TRL's form, which gets the messages of a prompt and not its text.

    Raises: ConfigError, as `load_custom`.
    """
    return isinstance(reward.function, PythonReward) and _trl_function(reward.function) is not None


def needed_columns(config: PythonReward) -> list[str]:
    """Return the columns without which a function in TRL's form cannot be called.

    Empty for other forms. Raises: ConfigError, as `load_custom`.
    """
    function = _trl_function(config)
    if function is None:
        return []
    return [
        name
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        and name not in TRL_ARGUMENTS
    ]


def takes_a_group(config: RewardFunction) -> bool:
    """True for a function whose parameter `samples` gets a single sample, without `group`."""
    if not isinstance(config, PythonReward) or config.group:
        return False
    function = load_hook(config.path)
    return not inspect.isclass(function) and "samples" in inspect.signature(function).parameters


def _trl_function(config: PythonReward) -> Callable[..., Any] | None:
    """Return the user's function if it has TRL's form, else None."""
    function = load_hook(config.path)
    if inspect.isclass(function):
        # The signature without an instance: a reward class may load a model when it is created.
        if hasattr(function, "compute_reward"):
            return None
        function = functools.partial(function.__call__, None)
    return function if _form(function, config.path) == "trl" else None


class _AsyncWithArgs:
    """Bind `args` in an object with an async `__call__`.

    `inspect.iscoroutinefunction` must recognise the result as async; a lambda would hide it.
    """

    def __init__(self, function: Callable[..., Any], args: Namespace) -> None:
        self._function = function
        self._args = args

    async def __call__(self, samples: Any) -> Any:
        return await self._function(self._args, samples)


def _is_async(function: Callable[..., Any]) -> bool:
    call_method = getattr(function, "__call__", None)  # noqa: B004 - an object with an async __call__, not a test for callable
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call_method)


def _instance(kind: type, config: PythonReward) -> Any:
    try:
        inspect.signature(kind).bind(**config.arguments)
    except TypeError as error:
        raise ConfigError(
            "the reward class does not accept these arguments",
            where="reward.function.arguments",
            found=f"{config.arguments}: {error}",
            expected=f"those of {kind.__name__}{inspect.signature(kind)}",
        ) from error
    try:
        instance = guarded(kind)(**config.arguments)
    except Exception as error:  # the user's class can raise anything
        raise ConfigError(
            "the reward class cannot be instantiated", where=config.path, found=error_text(error)
        ) from error
    if not hasattr(instance, "compute_reward") and not callable(instance):
        raise ConfigError(
            "the reward class has no method to call", where=config.path, expected=FORMS
        )
    return instance


def _from_compute_reward(method: Callable[..., Any], config: PythonReward) -> Callable[[Any], Any]:
    """Return `compute_reward(prompts, responses)` as a function of one sample or of a group."""
    signature = inspect.signature(method)
    if not _accepts(signature, 2):
        raise ConfigError(
            "not a reward class: compute_reward must have two arguments",
            where=config.path,
            found=f"compute_reward{signature}",
            expected=FORMS,
        )

    def score_group(samples: list[Sample]) -> Any:
        return method(
            [sample.prompt for sample in samples], [sample.response for sample in samples]
        )

    return _scores_lists(score_group, group=config.group, is_async=_is_async(method))


def _from_trl(
    function: Callable[..., Any], config: PythonReward, args: Namespace | None
) -> Callable[[Any], Any]:
    """Return a function in TRL's form as a function of one sample or of a group."""
    parameters = inspect.signature(function).parameters
    takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    label_key = getattr(args, "label_key", None)

    def score_group(samples: list[Sample]) -> Any:
        columns = _trl_columns(samples, label_key)
        given = {key: column for key, column in columns.items() if takes_all or key in parameters}
        return function(**given)

    return _scores_lists(score_group, group=config.group, is_async=_is_async(function))


def _trl_columns(samples: Sequence[Sample], label_key: str | None) -> dict[str, list[Any]]:
    """Return the keyword arguments of TRL's form, a list with one entry per sample each."""
    names = dict.fromkeys(name for sample in samples for name in sample.metadata)
    columns = {name: [sample.metadata.get(name) for sample in samples] for name in names}
    if label_key is not None:
        columns[label_key] = [sample.label for sample in samples]
    columns["prompts"] = [_prompt(sample) for sample in samples]
    columns["completions"] = [_completion(sample) for sample in samples]
    columns["completion_ids"] = [sample.response_ids for sample in samples]
    return columns


def _prompt(sample: Sample) -> Prompt:
    """Return the messages of a prompt that was rendered (`data.apply_chat_template`), else it."""
    return sample.metadata.get("messages", sample.prompt)


def _completion(sample: Sample) -> Any:
    text = without_end(sample.response)
    is_text = isinstance(_prompt(sample), str)
    return text if is_text else [{"role": "assistant", "content": text}]


def _scores_lists(
    score_group: Callable[[list[Sample]], Any], *, group: bool, is_async: bool
) -> Callable[[Any], Any]:
    """Return `score_group`, which gives a list, as a function of a group or of one sample.

    `is_async`: it gives a coroutine, and the result is an async function.
    """
    if is_async:

        async def score_async(samples: Any) -> Any:
            return await score_group(samples) if group else _only(await score_group([samples]))

        return score_async
    if group:
        return score_group

    def score_sample(sample: Sample) -> Any:
        rewards = score_group([sample])
        return _only_later(rewards) if inspect.isawaitable(rewards) else _only(rewards)

    return score_sample


async def _only_later(rewards: Any) -> Any:
    return _only(await rewards)


def _only(rewards: Any) -> Any:
    values = list(rewards)
    if len(values) != 1:
        raise ValueError(f"the function returned {len(values)} rewards for one response")
    return values[0]


def _form(function: Callable[..., Any], path: str) -> Form:
    """Return the form of a function by its parameters. Raises: ConfigError if it has none."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some built-in callables have no signature
        return "sample"
    if "completions" in signature.parameters:
        return "trl"
    if _accepts(signature, 2) and _is_slimes(list(signature.parameters.values())):
        return "slime"
    if _accepts(signature, 1):
        return "sample"
    renamed = get_close_matches("completions", list(signature.parameters), n=1)
    raise ConfigError(
        "the function cannot be called as a reward",
        where=path,
        found=f"{getattr(function, '__name__', type(function).__name__)}{signature}",
        expected=FORMS,
        do=f"rename the parameter {renamed[0]} to completions"
        if renamed
        else "change the parameters to one of these forms; their names decide the form",
    )


def _is_slimes(parameters: list[inspect.Parameter]) -> bool:
    """True if the first parameter is `args`, or the second one `sample` or `samples`.

    Every other function of two parameters is refused: its meaning would be a guess.
    """
    positional = [each.name for each in parameters if each.kind is not each.VAR_POSITIONAL]
    is_args = positional[:1] == [parameters[0].name] and positional[0].strip("_") == "args"
    return is_args or positional[1:2] in (["sample"], ["samples"])


def _accepts(signature: inspect.Signature, count: int) -> bool:
    """True if the function can be called with this number of positional arguments."""
    try:
        signature.bind(*range(count))
    except TypeError:
        return False
    return True
