"""What a decision rests on, in a sentence or two."""

from __future__ import annotations

from autotune.search.decision import Decision


def evidence_text(decision: Decision) -> str:
    """Say how many launches the decision rests on, how sure it is, and what is as good as the winner."""
    sentences = []
    if (evidence := decision.evidence) is not None:
        prompts = " on prompts that the search never saw" if evidence.is_heldout else ""
        sure = ""
        if evidence.leader_probability is not None:
            share = evidence.leader_probability
            shown = f"{share:.0%}" if share < 0.995 else "over 99%"
            sure = (
                f"; with {shown} probability the leader is within "
                f"{decision.margin_ratio:.0%} of the best finalist"
            )
        sentences.append(
            f"Evidence: {evidence.num_launches} fresh launches of {len(decision.finalists)} finalists, "
            f"{evidence.num_requests} requests{prompts}{sure}."
        )
    others = [decision.of(digest).label for digest in decision.tied if digest != decision.winner]
    if others:
        sentences.append(f"Not told apart from it: {', '.join(others)}.")
    return " ".join(sentences)
