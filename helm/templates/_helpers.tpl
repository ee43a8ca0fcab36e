{{/* Names, labels, and other definitions that more than one template needs. */}}

{{- define "waymark.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
{{- end }}

{{/* Cut so that the longest suffix fits: names have at most 63 characters. */}}
{{- define "waymark.fullname" -}}
{{- $name := include "waymark.name" . }}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 50 | trimSuffix "-" }}
{{- else if contains $name .Release.Name }}
{{- .Release.Name | trunc 50 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name $name | trunc 50 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{/* Called with root and role: the labels that select the pods of one role. They must never change. */}}
{{- define "waymark.selectorLabels" -}}
app.kubernetes.io/name: {{ include "waymark.name" .root }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .role }}
{{- end }}

{{/* Called with root and role. */}}
{{- define "waymark.labels" -}}
{{ include "waymark.selectorLabels" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- end }}

{{- define "waymark.image" -}}
{{- with .Values.image.registry }}{{ . }}/{{ end }}{{ .Values.image.repository }}
{{- if .Values.image.digest }}@{{ .Values.image.digest }}{{ else }}:{{ .Values.image.tag | default .Chart.AppVersion }}{{ end }}
{{- end }}

{{- define "waymark.serviceAccountName" -}}
{{- if .Values.serviceAccount.create }}
{{- default (include "waymark.fullname" .) .Values.serviceAccount.name }}
{{- else }}
{{- default "default" .Values.serviceAccount.name }}
{{- end }}
{{- end }}

{{/* A number as it is written in the values; Helm would render a large whole number as 1.6777216e+07. */}}
{{- define "waymark.text" -}}
{{- if and (kindIs "float64" .) (eq (floor .) .) }}{{ int64 . }}{{ else }}{{ . }}{{ end }}
{{- end }}

{{/* The URL of Redis; empty if a Secret of the operator has it. Exactly one value may say where Redis is. */}}
{{- define "waymark.redisUrl" -}}
{{- $redis := .Values.redis }}
{{- $places := 0 }}
{{- range list $redis.url $redis.existingSecret $redis.bundled.enabled }}{{ if . }}{{ $places = add1 $places }}{{ end }}{{ end }}
{{- if ne (int $places) 1 }}
{{- fail (printf "%d of redis.url, redis.existingSecret and redis.bundled.enabled are set: set one, to say where Redis is" (int $places)) }}
{{- end }}
{{- if $redis.bundled.enabled }}redis://{{ include "waymark.fullname" . }}-redis:6379/0{{ else }}{{ $redis.url }}{{ end }}
{{- end }}

{{/* The update strategy. Helm merges the bounds of the default into a type without bounds, which Kubernetes would refuse. */}}
{{- define "waymark.strategy" -}}
{{- if eq .type "Recreate" }}{{ toYaml (omit . "rollingUpdate") }}{{ else }}{{ toYaml . }}{{ end }}
{{- end }}

{{/* Called with root and file: the text of a file, with links to the address of the runbooks. */}}
{{- define "waymark.withRunbooks" -}}
{{- $text := .root.Files.Get .file }}
{{- with .root.Values.runbookUrl }}{{ $text = $text | replace "docs/operations.md#" (printf "%s#" .) }}{{ end }}
{{- $text }}
{{- end }}
