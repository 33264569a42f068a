"""Recognise questions that ask what changed between two images."""

import re

# Text that represents an image in a prompt: <image>, <|vision_start|>, [IMG], Image 1:
IMAGE_PLACEHOLDER = re.compile(
    r"<[^<>]*(?:image|img|vision|video)[^<>]*>|\[/?(?:IMG|INST)\]|\b(?:image|picture|img)[- ]?\d+:", re.I
)
# Short questions that ask what changed, in lowercase and without punctuation
SHORT_QUESTION = re.compile(
    r"(please )?(what (has )?(been )?changed|what is different|what differs|what (is|are) the (change|difference)s?"
    r"|(describe|list|find|spot|identify) (what changed|the (change|difference)s?))( between (the|these) two images)?"
)
# Long questions that ask what changed, also in lowercase and without punctuation. They are the questions of
# profiles/questions.yaml and similar ones. A long question is only recognised if it is listed here
LONG_QUESTIONS = {
    "what has changed from the first image to the second",
    "what is different in the second image",
    "what difference happened from image1 to image2",
    "describe in detail every change from the first image to the second",
    "compare the two images and describe the changes",
    "compare the two images and describe the differences",
    "compare the two images and say what changed",
    "look at the image before and the image after what changed",
    "say in words how the second image differs from the first",
    "which objects changed between the two images where are they and how did they change",
    "list all changes from the image before to the image after with their places",
    "give a full account of what differs between the two images",
}


def asks_what_changed(question: str) -> bool:
    """Return True if a question is known to ask what changed between two images."""
    plain_question = _plain_words(question)
    return SHORT_QUESTION.fullmatch(plain_question) is not None or plain_question in LONG_QUESTIONS


def _plain_words(question: str) -> str:
    """Return the lowercase words of a question, without image placeholders and punctuation."""
    text = IMAGE_PLACEHOLDER.sub(" ", question).casefold()
    return " ".join(re.sub(r"[^\w\s]", " ", text).split())
