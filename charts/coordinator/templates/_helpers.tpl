{{/* Name of everything in the release. */}}
{{- define "hub.fullname" -}}
{{- $name := .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- if or (hasSuffix "coordinator" $name) (hasSuffix "hub" $name) }}{{ $name }}{{ else }}{{ printf "%s-coordinator" $name }}{{ end -}}
{{- end }}

{{- define "hub.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "hub.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{ include "hub.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/part-of: fedsched
{{- end }}

{{- define "hub.image" -}}
{{- printf "%s:%s" .Values.image.repository (.Values.image.tag | default .Chart.AppVersion) -}}
{{- end }}

{{/* The hub's names in its certificate, as a YAML list. */}}
{{- define "hub.serverNames" -}}
{{- $name := include "hub.fullname" . -}}
{{- $own := list (printf "%s.%s.svc" $name .Release.Namespace) (printf "%s.%s" $name .Release.Namespace) $name -}}
{{- toYaml (.Values.serverNames | default $own) -}}
{{- end }}

{{/* What members dial. */}}
{{- define "hub.address" -}}
{{- .Values.publicAddress | default (printf "%s:%v" (include "hub.serverNames" . | fromYamlArray | first) .Values.link.port) -}}
{{- end }}

{{/* The hub's settings file: the user's, and on top of it what has to fit the rest of the pod. */}}
{{- define "hub.settings" -}}
{{- $own := dict "state_dir" "/var/lib/fedsched" "server_names" (include "hub.serverNames" . | fromYamlArray) -}}
{{- $_ := set $own "listen" (printf "0.0.0.0:%v" .Values.ports.link) -}}
{{- $_ := set $own "dashboard_listen" (printf "0.0.0.0:%v" .Values.ports.dashboard) -}}
{{- $_ := set $own "public_address" (include "hub.address" .) -}}
{{- range concat (keys $own) (list "registry_url") }}
{{- if hasKey $.Values.settings . }}
{{- fail (printf "settings.%s is made by the chart: see its values serverNames, publicAddress, registry and ports" .) }}
{{- end }}
{{- end }}
{{- toYaml (mergeOverwrite (deepCopy .Values.settings) $own) -}}
{{- end }}

{{/* What init, serve and `kubectl exec` have in common. */}}
{{- define "hub.container" -}}
image: {{ include "hub.image" . }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
{{- if or .Values.env .Values.registry.secret }}
env:
  {{- with .Values.registry.secret }}
  - name: FEDSCHED_COORDINATOR_REGISTRY_URL
    valueFrom:
      secretKeyRef: {name: {{ . }}, key: {{ $.Values.registry.key }}}
  {{- end }}
  {{- with .Values.env }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
resources: {{- toYaml .Values.resources | nindent 2 }}
volumeMounts:
  - {name: settings, mountPath: /etc/fedsched/settings, readOnly: true}
  - {name: state, mountPath: /var/lib/fedsched}
  - {name: temporary, mountPath: /tmp}
{{- end }}
