"""The reward of my_run: a number for each sampled response."""


def score(sample) -> float:
    """Return 1 for the right answer, else 0.

    `sample` has prompt, response, label (the row's `answer`) and metadata (an object in the row's
    column `metadata`, if any).
    """
    response = sample.response.strip()
    # Only differences within a prompt's samples teach. If right answers are too rare for that, give
    # a partial reward for progress towards the answer:
    #     return max(0.0, 0.5 - abs(int(response) - int(sample.label)) / 10)   # for a wrong digit
    # Do not reward form alone (0.2 for any digit): the policy then collapses to one form, all
    # samples of a prompt have the same reward, and training stops.
    return float(response == sample.label)
