"""The reward of my_run: a number for each sampled response."""


def score(sample) -> float:
    """Return 1 for the right answer, 0.2 for another digit, else 0.

    `sample` has prompt, response, label (the row's `answer`) and metadata (an object in the row's
    column `metadata`, if any).
    """
    response = sample.response.strip()
    if response == sample.label:
        return 1.0
    return 0.2 if response.isdigit() and len(response) == 1 else 0.0
