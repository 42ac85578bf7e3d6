"""Phrases that check_prose.py rejects: riddles, archaic words, and words that hide the field's own term.

A rule is for a phrase that is nearly always bad. One that also hits standard English is narrowed, or left out.
"""

import dataclasses
import re

CODE = "\ufffc"  # stands for each character of inline code
UNIT_START = "\x1e\n\n"  # before each docstring, comment and literal of a file, except the first


@dataclasses.dataclass(frozen=True, slots=True)
class Rule:
    """A phrase to reject.

    pattern: regular expression of whole words, without regard to case. A space matches white space with at most one
        line break. `CODE` matches inline code.
    opening: match only at the start of a docstring or comment.
    """

    name: str
    pattern: str
    reason: str
    suggestion: str
    opening: bool = False

    def compile(self) -> re.Pattern[str]:
        """The pattern as a regular expression."""
        start = rf"(?:\A|(?<={UNIT_START}))" if self.opening else r"(?<!\w)"
        body = self.pattern.replace("CODE", CODE + "+").replace(" ", r"(?:[ \t]*\n[ \t]*|[ \t]+)")
        return re.compile(rf"{start}(?:{body})(?!\w)", re.IGNORECASE)


def _rules(reason: str, *entries: tuple[str, str, str]) -> tuple[Rule, ...]:
    """Rules of one reason, each as (name, pattern, suggestion)."""
    return tuple(Rule(name, pattern, reason, suggestion) for name, pattern, suggestion in entries)


_IS = r"(?:is|are|was|were)"

RULES: tuple[Rule, ...] = (
    *_rules(
        "an amount without a number or a name",
        ("so many", r"so many(?! that\b)", 'name the number: "N tokens", "`count` tokens"'),
        (
            "so much",
            r"so much(?! (?:that|as|so|for|faster|slower|more|less|better|worse|larger|smaller|easier|harder)\b)",
            'name the amount: "this share", "`fraction` of"',
        ),
        (
            "as many as there are",
            r"as many(?: \w+)? as (?:there (?:is|are|was|were)(?= left|[.,;:)])|it|they|its|their)",
            'name the bound: "all N", "one per ...", "up to `limit`"',
        ),
        ("as far as", r"as far as(?! (?:possible|known|I|we)\b)", 'say the condition: "if", "until", "up to"'),
    ),
    *_rules(
        "a request, a row or a caller without its name",
        ("whoever", r"who(?:m|so)?ever(?:'s)?", '"the caller", "the client", "any request that"'),
        ("somebody", r"(?:some|any|every)body(?:'s)?", '"the caller", "the client", "another request"'),
        ("nobody", r"nobody(?:'s)?", '"no request", "no caller", "nothing"; or turn the sentence round'),
        (
            "who of a request",
            r"(?:all|nobody|requests?|beams?|rows?|answers?) who"
            r"|(?<!client\s)(?<!user\s)(?<!caller\s)(?<!reader\s)(?<!people\s)"
            r"who (?:passes|waits|gives|is beside|is preempted|came first|comes later|has a part|starts first|runs)",
            '"which request", "requests that"',
        ),
        ("the one who", r"the one (?:who|whose)", 'name it: "the operator", "the request whose"'),
    ),
    *_rules(
        "points at a thing instead of naming it",
        (
            "what it holds",
            r"what (?:it|they) (?:holds?|has|have|had|gives?|gave|got|stands?)(?! (?:to|for)\b)",
            'name it: "its blocks", "the request\'s block table", "the result"',
        ),
        (
            "what the X holds",
            r"what (?:the|a|an|each|its|all|every|one|another) [\w'-]+ (?:holds?|gives?|gave)",
            'name it: "the pool\'s blocks", "the layer\'s output", "the result of"',
        ),
        ("what there is", rf"what there {_IS}", "name it"),
        ("what stands", r"what(?:ever)? stands?", 'name it: "the text at", "the stand-in for"'),
        (
            "what comes",
            r"what (?:comes?|came)(?! (?:next|first|before|after|later|out|from)\b)",
            'name it: "the input", "the next request", "the following text"',
        ),
        ("what is beyond", r"what is (?:beyond|none)", 'name it: "more than N ...", "anything else"'),
        ("whatever it is", r"whatever (?:it|they|there|of|comes?|came)", '"any", "every", "regardless of the dtype"'),
        ("wherever it", r"wherever (?:it|they)", '"at any position", "in any file", "in any state"'),
        ("those that are left", r"(?:those|the ones) that are left|those of which", '"the remaining blocks"'),
        (
            "that one",
            r"that one(?=[.,;:)]| (?:has|is|was|does|decodes|first|itself|stands|gave|gives|holds)\b)",
            "repeat the noun",
        ),
        ("the others'", r"the others'", 'repeat the noun: "the other rows\' values"'),
        ("a text", rf"(?:be|not|{_IS}) (?:a text|texts)|(?:list|sequence|array)s? of texts", '"a string", "strings"'),
    ),
    *_rules(
        "not English word order, or a clause piled on a clause: readers parse it twice",
        ("of which", r"(?:of|behind|beside) (?:which|whom)", "start a new sentence with the noun"),
        (
            "Of ...",
            r"(?-i:Of) (?:an?|all|the(?! \d)|its|their|such|what|which|one|two|several|each|every|steps)",
            "start with the subject",
        ),
        ("else than", r"else than", '"other than"'),
        (
            "is no X",
            rf"(?<!there\s)(?<!here\s){_IS} no (?!longer|more|less|fewer|later|earlier|way|need|reason|better|worse"
            r"|different|such|other|further|limit|point|matter|help)[a-z]\w*",
            '"is not a ...", "is not an ..."',
        ),
        ("is none", r"(?:it|that|which|what|they) (?:is|are) none", '"is not one", "is not a call"'),
        ("as of `x`", r"as of CODE", '"see `x`", "the same as `x`"'),
        ("is not there", rf"{_IS} not there(?! (?:a|an|any)\b)", '"is missing", "does not exist", "is not installed"'),
        ("is there already", rf"{_IS} (?:already there|there already)", '"exists", "is cached", "is loaded"'),
        (
            "is another",
            r"(?:is|are|be) (?:another|others?|other) than|other ones|are others|it is another",
            '"differs from", "is different", "different"',
        ),
        ("comes to its end", r"comes? to its end", '"ends", "finishes"'),
        ("up to and with", r"up to and with", '"up to and including"'),
        ("until when", r"(?:until|since) when", '"the step at which", "how long"'),
        ("makes of", r"makes? of", 'name the result: "the sampler\'s output", "compiles it to"'),
    ),
    Rule(
        "opens with What",
        r"(?-i:What)(?! (?:if|about|to)\b)(?![^.\n]*\?)",
        "a question word where a noun or a verb would do",
        "start with the noun or the verb",
        opening=True,
    ),
    Rule(
        "opens with Most",
        r"(?-i:Most) (?!of\b)\w+ (?:of|that|an?|in|which|computed)",
        "an adjective where the field says maximum",
        '"Maximum number of tokens", "Largest batch", "Capacity of"',
        opening=True,
    ),
    *_rules(
        "archaic, or an idiom that readers stop at",
        ("anew", r"anew", '"again"; of KV: "recompute"; of a process: "restart"'),
        (
            "archaic word",
            r"thereby|whence|thence|there(?:in|of|to|upon)|where(?:in|of|upon)|here(?:in|of|by|upon)|hitherto"
            r"|henceforth|heretofore|lest|whilst|amongst|albeit|unto|betwixt|forthwith|afore(?:said|mentioned)"
            r"|(?<!once\s)upon|aught|nought",
            'the plain word: "so", "in it", "then", "until now", "while", "on"',
        ),
        ("by itself alone", r"by (?:it|them)sel(?:f|ves) alone", '"alone" or "only"'),
        ("but for", r"but for", '"except", "except for"'),
        ("is had", rf"(?:to be|{_IS}) had|had of", '"is available", "from"'),
        ("spoken for", r"spoken for", '"assigned", "taken", "reserved"'),
        ("goes without", r"(?:goes?|went) without(?! saying\b)", '"has no", "needs no"'),
        ("seen to", r"(?:be|been|has|have|had|is|are|was|were) seen to", '"checked", "ensured", "handled"'),
        ("one's own", r"(?:of )?one's own", '"private", "its own"'),
        ("of no use", r"of no use", '"not allowed", "unused"'),
        ("rather no", r"rather (?:no|too)", '"an estimate that is too high", "no answer is better than"'),
        ("as X has it", r"as (?:the |an? )?(?:[\w']+|CODE)(?: \w+)? (?:has|have) (?:it|them)(?=[.,;:)])", '"as in X"'),
        ("says of itself", r"says? of (?:it|them)sel(?:f|ves)", '"its own description", "its metadata"'),
        ("to the bit", r"to the bit(?=[.,;:)]|\Z| (?:what(?:ever)?|against|alone)\b)", '"bit for bit"'),
        ("for people", r"for people(?! (?:who|to|with)\b)", '"for error messages", "readable"'),
    ),
    *_rules(
        "a word of space for time, order, company or possession",
        ("beside", r"beside", '"in the same batch", "next to", "in addition to", "compared with"'),
        (
            "behind",
            r"(?<!far\s)(?<!lags\s)behind(?! (?:by\b|\|))"
            r"(?! (?:an?|the|its|your|some) (?:reverse |load |HTTP )?(?:proxy|proxies|balancer|flag|option|marker"
            r"|firewall|lock|gateway|server|API|interface|scenes|choices?|figures?)\b)",
            '"after", "before", "following", "outside the window"',
        ),
        (
            "stands in",
            r"stands? (?:in|at|there|behind|before|where|beside|between|on|as|after|nowhere|around)(?! for\b)",
            '"is in", "is at", "appears", "starts"',
        ),
        (
            "lies in",
            r"(?:lies?|lay|lain) (?:behind|beside|on|at|there|where|wherever|before|apart|in|inside|as|over|all over)",
            '"is in", "is stored in", "is at"',
        ),
        ("on its way", r"on (?:its|their) way(?! (?:to|from|through|out)\b)", '"in flight", "pending"'),
    ),
    *_rules(
        "the field has a verb or noun for this",
        ("told", r"told(?! apart\b)", '"reported", "returned", "logged", "passed", "configured"'),
        (
            "tell of",
            r"tells? (?:of|about)|(?:does|do|did) not tell(?=[.,;:)]|\Z| (?:how|its|of)\b)",
            '"describe", "report", "say", "show"',
        ),
        ("said once", r"said once", '"logged once"'),
        (
            "give back",
            r"(?:give|gives|given|gave|giving)(?: (?:it|them|both|(?:its|the|all|their) \w+))? back",
            '"free", "release", "return"',
        ),
        ("give out", r"(?:give|gives|given|gave|giving) out", '"emit", "return", "flush"'),
        ("let go of", r"lets? go(?: of)?|letting go(?: of)?", '"free", "release", "drop"'),
        ("throw out", r"(?:throws?|threw|thrown) (?:each other|one another|it|them) out", '"preempt", "evict"'),
        ("give way", r"(?:give|gives|gave|giving) way", '"is preempted", "is evicted"'),
        ("go by", r"(?<!time\s)(?:goes?|went|going) by(?! the name\b)", '"depends on", "uses", "is chosen by"'),
        ("have part in", r"(?:had|has|have|having) (?:a |no )?part in", '"ran in", "affects", "has no effect on"'),
        ("passed over", r"(?:be|is|are|was|were) passed over", '"skipped", "ignored"'),
        ("done with", r"that (?:is|are) done with", '"no longer needed"'),
        ("books", r"(?:engine's|the|its|old|whose) books", '"bookkeeping", or name it: "the block tables"'),
        ("equals", r"of equals|their equals|equals of|equals in the order|of equal ones", '"ties", "on a tie"'),
    ),
)
