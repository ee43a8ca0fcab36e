"""``commit_message.py FILE``: exits with 1 if the subject of the message in FILE is too long, or if the body is
missing."""

import sys
from pathlib import Path

SUBJECT_CHARS_MAX = 60
#: Git writes this line; the text below it is not part of the message.
SCISSORS = "# ------------------------ >8 ------------------------"
#: Git writes these messages itself.
WRITTEN_BY_GIT = ("Merge ", "Revert ", "Reapply ", "fixup! ", "squash! ", "amend! ")


def complaint(message: str) -> str | None:
    """Return the fault of a message, and how to mend it; None if the message is in order."""
    text = message.partition(SCISSORS)[0]
    lines = "\n".join(line for line in text.splitlines() if not line.startswith("#")).strip().split("\n")
    subject = lines[0]
    if not subject or subject.startswith(WRITTEN_BY_GIT):  # Git itself refuses an empty message
        return None
    if len(subject) > SUBJECT_CHARS_MAX:
        return f"the subject has {len(subject)} characters; write at most {SUBJECT_CHARS_MAX}: {subject}"
    if len(lines) < 3 or lines[1].strip():
        return f"leave the line below the subject empty, and then say why the change is made: {subject}"
    return None


if __name__ == "__main__":
    if found := complaint(Path(sys.argv[1]).read_text(encoding="utf-8")):
        sys.exit(found)
