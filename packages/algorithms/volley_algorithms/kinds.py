"""The package's algorithms, as its entry points name them."""

from shared.algorithm_kinds import AlgorithmKind
from volley_algorithms.sections import (
    CispoSection,
    DppoSection,
    EchoSection,
    GdpoSection,
    KpopSection,
    MopdSection,
    OnPolicyDistillationSection,
    OwnSection,
    RaeSection,
    ReinforcePlusPlusSection,
    SaoSection,
    SapoSection,
)

CISPO = AlgorithmKind(CispoSection, "volley_algorithms.cispo:Cispo")
DPPO = AlgorithmKind(DppoSection, "volley_algorithms.dppo:Dppo")
ECHO = AlgorithmKind(EchoSection, "volley_algorithms.echo:Echo")
GDPO = AlgorithmKind(GdpoSection, "volley_algorithms.gdpo:Gdpo")
KPOP = AlgorithmKind(KpopSection, "volley_algorithms.kpop:Kpop")
MOPD = AlgorithmKind(MopdSection, "volley_algorithms.mopd:Mopd")
ON_POLICY_DISTILLATION = AlgorithmKind(
    OnPolicyDistillationSection, "volley_algorithms.on_policy_distillation:OnPolicyDistillation"
)
OWN = AlgorithmKind(OwnSection, "volley_algorithms.rules.own:Own")
RAE = AlgorithmKind(RaeSection, "volley_algorithms.rae:Rae")
REINFORCE_PLUS_PLUS = AlgorithmKind(ReinforcePlusPlusSection, "volley_algorithms.reinforce_plus_plus:ReinforcePlusPlus")
SAO = AlgorithmKind(SaoSection, "volley_algorithms.sao:Sao")
SAPO = AlgorithmKind(SapoSection, "volley_algorithms.sapo:Sapo")
