"""Score answers to questions of the dataset: exact match, and accuracies of yes/no, number and choice questions.

Only records with a question of their own have these scores. An answer is right if it matches any of the record's
references. Exact match compares normalised texts, as SQuAD does (Rajpurkar et al., EMNLP 2016): in lower case, without
punctuation and articles, and with single spaces. Many models wrap a short answer in a sentence ("There are two."), so
exact match counts it as wrong. Three accuracies read the answer instead. A record has at most one of them, the first
one whose form all of its references have:

choice: the question lists options, such as "A. red B. blue" or "(a) red (b) blue", with consecutive letters from A, and
    each reference names one of them. An option is named by its letter or by its whole text. A letter counts if it is
    the whole answer ("B", "(b)", "**B**"), if it begins the answer before one of the signs `.):,` ("B. blue"), or if it
    ends the answer after the word answer, option or choice ("The answer is B."). If letter and text disagree, the
    letter counts. The article of "A red car" is not read as a letter.
yes_no: each reference is the word yes, no, true or false. Yes equals true, and no equals false. The answer is its first
    word: "No, nothing was built." is no.
number: each reference is a number in digits ("2", "1,200", "-0.5") or in words up to 999 ("two", "twenty-one"), perhaps
    with a sign such as "%". The answer is the only number in its text: "There are two buildings." equals "2". A text
    with several different numbers gives no answer.
"""

import re
import string
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Literal, NamedTuple

from m3diff.scoring.metrics import Metric, MetricInputs, MetricScores, PairValue, Value, mean_of
from m3diff.scoring.pairs import ALL_PAIRS, EvalPair, Groups

Form = Literal["choice", "yes_no", "number"]

NO_SHUFFLED = "no question about two images was also asked about a shuffled pair (predictions_shuffled.json)"
ARTICLE = re.compile(r"\b(?:a|an|the)\b")

TRUTH_VALUES = {"yes": True, "true": True, "no": False, "false": False}

OPTION = re.compile(r"(?<![\w.])\(?([A-Za-z])[.):]")
LETTER_AT_START = re.compile(r"[\W_]*([A-Za-z])(?:[\W_]*$|[.):,])")
LETTER_AT_END = re.compile(r"\b(?:answer|option|choice)\b(?:\s+is\b)?[\W_]*\b([A-Za-z])[\W_]*$", re.IGNORECASE)

NUMBER = r"(?<![\w.])[-+]?(?:\d{1,3}(?:,\d{3})+|\d+|(?=\.\d))(?:\.\d+)?(?!\w)"
NUMBER_OR_WORD = re.compile(rf"(?P<number>{NUMBER})|(?P<word>[^\W\d_]+)|(?P<other>\w+)")
SMALL_NUMBER_WORDS = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
)  # fmt: skip
TENS_WORDS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
NUMBER_WORDS = {word: value for value, word in enumerate(SMALL_NUMBER_WORDS)}
NUMBER_WORDS |= {word: 10 * tens for tens, word in enumerate(TENS_WORDS, start=2)}


def is_exact_match(prediction: str, references: Iterable[str]) -> bool:
    """Return whether a normalised prediction equals a normalised reference. Blank references are no answers."""
    normal_prediction = normalise_answer(prediction)
    return any(normalise_answer(reference) == normal_prediction for reference in references if reference.strip())


def normalise_answer(text: str) -> str:
    """Return a text in lower case, without punctuation and articles, and with single spaces.

    A text that has no other words keeps its articles, so that the option "A" does not equal an empty answer. A text
    without words, such as "?", is kept as it is.
    """
    lower = unicodedata.normalize("NFKC", text).lower()
    words = " ".join("".join(sign for sign in lower if not is_punctuation(sign)).split())
    words_without_articles = " ".join(ARTICLE.sub(" ", words).split())
    return words_without_articles or words or text.strip()


def is_punctuation(sign: str) -> bool:
    """Return whether a character is punctuation of any script or one of ASCII's signs, such as "+" or "%"."""
    return sign in string.punctuation or unicodedata.category(sign).startswith("P")


# Reading an answer


class ReadNumbers(NamedTuple):
    """The numbers in a text, and whether the text has other words."""

    numbers: list[Decimal]
    has_other_words: bool


@dataclass
class NumberReader:
    """Collects the numbers of a text, word by word. Consecutive words may form one number ("one hundred and five").

    Attributes:
        numbers: the complete numbers.
        open_number: the number that the words so far form, which the next word may extend. None between numbers.
        has_other_words: whether a word is not part of a number.
    """

    numbers: list[Decimal] = field(default_factory=list)
    open_number: int | None = None
    has_other_words: bool = False

    def read_digits(self, digits: str) -> None:
        """Read a number in digits."""
        self.close()
        self.numbers.append(Decimal(digits.replace(",", "")))

    def read_word(self, word: str) -> None:
        """Read a word in lower case."""
        number = self.open_number
        value = NUMBER_WORDS.get(word)
        if word == "hundred" and number is not None and 0 < number < 10:
            self.open_number = 100 * number
        elif word == "and" and number is not None and number % 100 == 0:
            return
        elif value is None:
            self.close()
            self.has_other_words = True
        elif number is not None and extends_number(number, value):
            self.open_number = number + value
        else:
            self.close()
            self.open_number = value

    def close(self) -> None:
        """Complete the number that the last words formed."""
        if self.open_number is not None:
            self.numbers.append(Decimal(self.open_number))
            self.open_number = None


def extends_number(number: int, value: int) -> bool:
    """Return whether the words for two numbers form one: "twenty" and "one", or "two hundred" and "sixteen"."""
    if number >= 100 and number % 100 == 0:
        return 0 < value < 100
    return number % 100 >= 20 and number % 10 == 0 and 0 < value < 10


def read_numbers(text: str) -> ReadNumbers:
    """Return all numbers in a text, in digits or in words."""
    reader = NumberReader()
    for match in NUMBER_OR_WORD.finditer(unicodedata.normalize("NFKC", text).replace("\u2212", "-").lower()):
        if match["number"]:
            reader.read_digits(match["number"])
        elif match["word"]:
            reader.read_word(match["word"])
        else:
            reader.close()
            reader.has_other_words = True
    reader.close()
    return ReadNumbers(reader.numbers, reader.has_other_words)


def read_number(text: str) -> Decimal | None:
    """Return the number in a text. None if the text has no number, or has different numbers."""
    numbers = set(read_numbers(text).numbers)
    return numbers.pop() if len(numbers) == 1 else None


def read_bare_number(text: str) -> Decimal | None:
    """Return the number that a text is, or None if it has other words."""
    numbers, has_other_words = read_numbers(text)
    return numbers[0] if len(numbers) == 1 and not has_other_words else None


def read_truth_value(text: str) -> bool | None:
    """Return whether the first word of a text says yes or no. None if it says neither."""
    first_word = re.search(r"\w+", text.lower())
    return None if first_word is None else TRUTH_VALUES.get(first_word[0])


def read_bare_truth_value(text: str) -> bool | None:
    """Return whether a text is the word yes or the word no. None if it is neither."""
    return TRUTH_VALUES.get(" ".join(re.findall(r"\w+", text.lower())))


def find_options(question: str) -> dict[str, str]:
    """Return the options that a question lists: letter in upper case -> normalised text.

    The letters must be consecutive, beginning with A. Without two such options, the result is empty.
    """
    markers: list[re.Match[str]] = []
    for match in OPTION.finditer(question):
        letter = match[1].upper()
        if letter == "A" and len(markers) < 2:
            markers = [match]  # an earlier A was a word, as in "Compare image A: ..."
        elif markers and letter == chr(ord("A") + len(markers)):
            markers.append(match)
    if len(markers) < 2:
        return {}
    ends = [match.start() for match in markers[1:]] + [len(question)]
    return {
        match[1].upper(): normalise_answer(question[match.end() : end])
        for match, end in zip(markers, ends, strict=True)
    }


def read_choice(text: str, options: Mapping[str, str]) -> str | None:
    """Return the letter of the option that a text names, or None. See the module's docstring for what names an option.

    Args:
        options: result of `find_options`.
    """
    match = LETTER_AT_START.match(text) or LETTER_AT_END.search(text)
    if match is not None and match[1].upper() in options:
        return match[1].upper()
    normal_text = normalise_answer(text)
    return next((letter for letter, option in options.items() if option == normal_text), None)


# Scoring


class FormVerdict(NamedTuple):
    """The form of a record's references, and whether its prediction is right when it is read in this form."""

    form: Form
    is_right: bool


def judge_form(question: str, prediction: str, references: Sequence[str]) -> FormVerdict | None:
    """Judge a prediction by the first form that all references have. Return None if they have no form in common."""
    texts = [reference for reference in references if reference.strip()]
    options = find_options(question)
    if options:
        choices = read_all(texts, lambda text: read_choice(text, options))
        if choices:
            return FormVerdict("choice", read_choice(prediction, options) in choices)
    truth_values = read_all(texts, read_bare_truth_value)
    if truth_values:
        return FormVerdict("yes_no", read_truth_value(prediction) in truth_values)
    numbers = read_all(texts, read_bare_number)
    if numbers:
        return FormVerdict("number", read_number(prediction) in numbers)
    return None


def read_all(texts: Sequence[str], read: Callable[[str], object]) -> list[object]:
    """Read all texts. Return an empty list if one of them cannot be read."""
    values = [read(text) for text in texts]
    return [] if None in values else values


def compute(pairs: list[EvalPair], groups: Groups, inputs: MetricInputs) -> MetricScores:
    """Score the records with a question of their own. A score of a group is the share of right answers.

    Besides the shares, a group has the number of its questions of each form. An accuracy without a question is null.
    """
    del inputs
    values_by_id = {pair.id: judge_answer(pair) for pair in pairs}
    scores: dict[str, dict[str, Value]] = {
        group: score_group([values_by_id[pair_id] for pair_id in ids]) for group, ids in groups.items()
    }
    scores[ALL_PAIRS] |= score_control(pairs)
    absent = {} if scores[ALL_PAIRS]["shuffled_questions"] else {"exact_match_shuffled": NO_SHUFFLED}
    return MetricScores(scores, values_by_id, absent)


def score_control(pairs: Iterable[EvalPair]) -> dict[str, Value]:
    """Return the exact match of the questions in the shuffled control, and of the same questions about their own pairs.

    The control has only questions about two images, so the exact match of all questions would be no comparison.
    """
    shuffled_matches: list[bool] = []
    true_matches: list[bool] = []
    for pair in pairs:
        if pair.shuffled_prediction is not None:
            shuffled_matches.append(is_exact_match(pair.shuffled_prediction, pair.references))
            true_matches.append(is_exact_match(pair.prediction, pair.references))
    return {
        "exact_match_shuffled": share_of_right(shuffled_matches),
        "exact_match_unshuffled": share_of_right(true_matches),
        "shuffled_questions": len(shuffled_matches),
    }


def judge_answer(pair: EvalPair) -> dict[str, PairValue]:
    """Return the columns of scores.parquet for a record. The columns of other forms are null."""
    values: dict[str, PairValue] = {"exact_match": is_exact_match(pair.prediction, pair.references)}
    verdict = judge_form(pair.question or "", pair.prediction, pair.references)
    if verdict is not None:
        values[f"{verdict.form}_right"] = verdict.is_right
    return values


def score_group(values: Sequence[Mapping[str, PairValue]]) -> dict[str, Value]:
    """Return the scores of a group of records, and its number of questions: in all, and of each form."""
    scores: dict[str, Value] = {"exact_match": share_of_right([bool(row["exact_match"]) for row in values])}
    counts: dict[str, Value] = {"questions": len(values)}
    for form in FORMS:
        verdicts = [bool(row[f"{form}_right"]) for row in values if f"{form}_right" in row]
        scores[f"{form}_accuracy"] = share_of_right(verdicts)
        counts[f"{form}_questions"] = len(verdicts)
    return scores | counts


def share_of_right(verdicts: Sequence[bool]) -> float | None:
    """Return the share of verdicts that are true, or None without verdicts."""
    return sum(verdicts) / len(verdicts) if verdicts else None


FORMS: tuple[Form, ...] = ("yes_no", "number", "choice")  # in the order of the scores
COLUMN_OF_SCORE = {"exact_match": "exact_match"} | {f"{form}_accuracy": f"{form}_right" for form in FORMS}
METRIC = Metric(
    compute,
    main_score="exact_match",
    scores=tuple(COLUMN_OF_SCORE),
    overall=("exact_match_shuffled", "exact_match_unshuffled"),
    columns=dict.fromkeys(COLUMN_OF_SCORE.values(), "bool"),
    resampled={score: mean_of(column) for score, column in COLUMN_OF_SCORE.items()},
    lower_is_better=("exact_match_shuffled",),
    java=False,
    records="questions",
)
