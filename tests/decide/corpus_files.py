"""Picker files of the recorded decisions: one weighted profile, filters by label, and separate prefill."""

PICKER_FILES = {
    "weighted": """
kind: EndpointPickerConfig
plugins:
- type: single-profile-handler
- type: precise-prefix-cache-scorer
- type: kv-cache-utilization-scorer
- type: queue-scorer
- type: max-score-picker
schedulingProfiles:
- name: default
  plugins:
  - {pluginRef: precise-prefix-cache-scorer, weight: 2}
  - {pluginRef: kv-cache-utilization-scorer}
  - {pluginRef: queue-scorer, weight: 1.0}
  - {pluginRef: max-score-picker}
""",
    "labels": """
kind: EndpointPickerConfig
plugins:
- type: single-profile-handler
- {name: gold, type: by-label, parameters: {label: tier, validValues: [gold], allowsNoLabel: false}}
- type: active-request-scorer
- type: load-aware-scorer
- type: precise-prefix-cache-scorer
- type: max-score-picker
schedulingProfiles:
- name: default
  plugins:
  - {pluginRef: gold}
  - {pluginRef: active-request-scorer}
  - {pluginRef: load-aware-scorer, weight: 3}
  - {pluginRef: precise-prefix-cache-scorer, weight: 2}
  - {pluginRef: max-score-picker}
""",
    "apart": """
kind: EndpointPickerConfig
plugins:
- type: disagg-headers-handler
- {type: prefix-based-pd-decider, parameters: {nonCachedTokens: 16}}
- type: prefill-filter
- type: decode-filter
- type: active-request-scorer
- type: precise-prefix-cache-scorer
- type: disagg-profile-handler
  parameters: {deciders: {prefill: prefix-based-pd-decider}}
schedulingProfiles:
- name: prefill
  plugins: [{pluginRef: prefill-filter}, {pluginRef: active-request-scorer}]
- name: decode
  plugins: [{pluginRef: decode-filter}, {pluginRef: precise-prefix-cache-scorer}, {pluginRef: active-request-scorer}]
""",
}
