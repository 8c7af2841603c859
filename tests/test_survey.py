"""The order tasks are begun in, and what taking digests of the source adds to a survey."""

from __future__ import annotations

from tonnage.prepare.survey import OutputSize, Survey, TaskSize, in_order, with_digests


def job(number: int, source: str, nbytes: int) -> TaskSize:
    output = OutputSize(path=f"rank-0/{number}", rank=0, payload_bytes=nbytes, file_bytes=nbytes + 8)
    return TaskSize(number=number, source=source, outputs=(output,))


def side_file(number: int, nbytes: int) -> TaskSize:
    output = OutputSize(path=f"{number}.json", rank=None, payload_bytes=0, file_bytes=nbytes)
    return TaskSize(number=number, source=f"{number}.json", outputs=(output,))


JOBS = (job(0, "a", 4000), job(1, "a", 1000), job(2, "b", 3900), job(3, "b", 4090), job(4, "c", 70), side_file(5, 20))
SURVEY = with_digests(Survey(tasks=JOBS, digest="5ced"), {"b": 7990, "a": 5000, "c": 100})


def numbers(tasks: list[TaskSize]) -> list[int]:
    return [task.number for task in tasks]


def test_digests_are_tasks_behind_all_others_in_the_order_of_names() -> None:
    assert [(task.number, task.source, task.digested_bytes) for task in SURVEY.tasks[6:]] == [
        (6, "a", 5000),
        (7, "b", 7990),
        (8, "c", 100),
    ]
    assert SURVEY.tasks[:6] == JOBS


def test_what_is_written_does_not_depend_on_digests() -> None:
    without = Survey(tasks=JOBS, digest="5ced")
    assert (SURVEY.digest, SURVEY.outputs, SURVEY.written_bytes) == (without.digest, without.outputs, 13_080)
    assert (without.progress_bytes, SURVEY.progress_bytes) == (13_080, 13_080 + 5000 + 7990 + 100)


def test_larger_jobs_come_first_and_jobs_of_one_file_stay_together_behind_its_digest() -> None:
    """4000, 3900 and 4090 are of one power of two; 1000 is of a lower one, 70 and 20 of still lower ones."""
    assert numbers(in_order(SURVEY.tasks)) == [6, 0, 7, 2, 3, 1, 8, 4, 5]


def test_the_digest_of_a_file_whose_jobs_are_done_has_the_place_of_its_size() -> None:
    left = [task for task in SURVEY.tasks if task.number not in (0, 1, 4)]
    assert numbers(in_order(left)) == [6, 7, 2, 3, 8, 5]


def test_an_empty_source_file_is_digested_too() -> None:
    survey = with_digests(Survey(tasks=(), digest=""), {"empty": 0})
    assert numbers(in_order(survey.tasks)) == [0]
    assert survey.progress_bytes == 0
