"""``commit_message.py FILE``: exits with 1 where the message in FILE has too long a subject, or does not say why."""

import sys
from pathlib import Path

SUBJECT_CHARS_MAX = 60
#: Below this line of git's own, a message is not read.
SCISSORS = "# ------------------------ >8 ------------------------"
#: Git writes these messages itself.
WRITTEN_BY_GIT = ("Merge ", "Revert ", "Reapply ", "fixup! ", "squash! ", "amend! ")


def complaint(message: str) -> str | None:
    """What is wrong with a message, and what to write; None if nothing is."""
    text = message.partition(SCISSORS)[0]
    lines = "\n".join(line for line in text.splitlines() if not line.startswith("#")).strip().split("\n")
    subject = lines[0]
    if not subject or subject.startswith(WRITTEN_BY_GIT):  # git itself refuses an empty message
        return None
    if len(subject) > SUBJECT_CHARS_MAX:
        return f"the subject has {len(subject)} characters; write at most {SUBJECT_CHARS_MAX}: {subject}"
    if len(lines) < 3 or lines[1].strip():
        return f"leave the line below the subject empty, and then say why the change is made: {subject}"
    return None


if __name__ == "__main__":
    if found := complaint(Path(sys.argv[1]).read_text(encoding="utf-8")):
        sys.exit(found)
