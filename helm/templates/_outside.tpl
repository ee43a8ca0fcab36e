{{/* The parts that query replicas and gateways share: an Ingress, an HTTPRoute and an autoscaler. Each is called with root, role,
name (of the Service) and values. */}}

{{/* Fail if a value of a part is set and the part is not enabled. Called with part, its values, and the value. */}}
{{- define "waymark.needs" -}}
{{- if not .values.enabled }}
{{- fail (printf "%s is set without %s.enabled, so there is nothing that it could lead to: set %s.enabled=true too" .value .part .part) }}
{{- end }}
{{- end }}

{{- define "waymark.ingress" -}}
{{- $ := . }}
{{- with .values.ingress }}
apiVersion: networking.k8s.io/v1
kind: Ingress
metadata:
  name: {{ $.name }}
  labels:
    {{- include "waymark.labels" (dict "root" $.root "role" $.role) | nindent 4 }}
  {{- with .annotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  {{- with .className }}
  ingressClassName: {{ . }}
  {{- end }}
  {{- with .tls }}
  tls:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  rules:
    {{- range (.hosts | default (list "")) }}
    - {{ with . }}host: {{ quote . }}
      {{ end }}http:
        paths:
          - path: /
            pathType: Prefix
            backend:
              service:
                name: {{ $.name }}
                port:
                  name: http
    {{- end }}
{{- end }}
{{- end }}

{{- define "waymark.httpRoute" -}}
{{- $ := . }}
{{- with .values.httpRoute }}
{{- if not .parentRefs }}
{{- fail (printf "%s.httpRoute is enabled without parentRefs: name the Gateway, such as [{name: public, namespace: gateways}]" $.role) }}
{{- end }}
apiVersion: gateway.networking.k8s.io/v1
kind: HTTPRoute
metadata:
  name: {{ $.name }}
  labels:
    {{- include "waymark.labels" (dict "root" $.root "role" $.role) | nindent 4 }}
  {{- with .annotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  parentRefs:
    {{- toYaml .parentRefs | nindent 4 }}
  {{- with .hostnames }}
  hostnames:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  rules:
    - matches:
        - path: {type: PathPrefix, value: /}
      backendRefs:
        - name: {{ $.name }}
          port: {{ $.values.service.port }}
{{- end }}
{{- end }}

{{/* Also called with target: the name of the value with the requests of one pod. */}}
{{- define "waymark.autoscaler" -}}
{{- $ := . }}
{{- with .values.autoscaling }}
{{- $requests := get . $.target }}
{{- if not (or .targetCPUUtilizationPercentage $requests) }}
{{- fail (printf "%s.autoscaling has no target: set targetCPUUtilizationPercentage or %s" $.role $.target) }}
{{- end }}
apiVersion: autoscaling/v2
kind: HorizontalPodAutoscaler
metadata:
  name: {{ include "waymark.fullname" $.root }}-{{ $.role }}
  labels:
    {{- include "waymark.labels" (dict "root" $.root "role" $.role) | nindent 4 }}
spec:
  scaleTargetRef:
    apiVersion: apps/v1
    kind: Deployment
    name: {{ include "waymark.fullname" $.root }}-{{ $.role }}
  minReplicas: {{ .minReplicas }}
  maxReplicas: {{ .maxReplicas }}
  metrics:
    {{- if .targetCPUUtilizationPercentage }}
    - type: Resource
      resource:
        name: cpu
        target:
          type: Utilization
          averageUtilization: {{ .targetCPUUtilizationPercentage }}
    {{- end }}
    {{- if $requests }}
    - type: Pods
      pods:
        metric:
          name: {{ .requestsMetric }}
        target:
          type: AverageValue
          averageValue: {{ include "waymark.text" $requests | quote }}
    {{- end }}
{{- end }}
{{- end }}
